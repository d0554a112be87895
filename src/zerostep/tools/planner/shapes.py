"""Models by name: their parameters, from the published sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["NAMED_SHAPES", "parameters_of"]

Named = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Gpt2:
    """Learned positions, biases everywhere, and a head that is the embedding."""

    width: int
    layers: int
    vocabulary: int = 50257
    context: int = 1024

    def parameters(self) -> Iterator[Named]:
        width = self.width
        yield "transformer.wte.weight", (self.vocabulary, width)
        yield "transformer.wpe.weight", (self.context, width)
        for layer in range(self.layers):
            inside = f"transformer.h.{layer}"
            yield from _norm(f"{inside}.ln_1", width)
            yield from _affine(f"{inside}.attn.c_attn", width, 3 * width)
            yield from _affine(f"{inside}.attn.c_proj", width, width)
            yield from _norm(f"{inside}.ln_2", width)
            yield from _affine(f"{inside}.mlp.c_fc", width, 4 * width)
            yield from _affine(f"{inside}.mlp.c_proj", 4 * width, width)
        yield from _norm("transformer.ln_f", width)


@dataclass(frozen=True)
class _Llama:
    """No biases, a head of its own, and keys and values of fewer heads in the large ones."""

    width: int
    layers: int
    hidden: int
    key_width: int
    vocabulary: int = 32000

    def parameters(self) -> Iterator[Named]:
        width = self.width
        yield "model.embed_tokens.weight", (self.vocabulary, width)
        for layer in range(self.layers):
            inside = f"model.layers.{layer}"
            yield f"{inside}.self_attn.q_proj.weight", (width, width)
            yield f"{inside}.self_attn.k_proj.weight", (self.key_width, width)
            yield f"{inside}.self_attn.v_proj.weight", (self.key_width, width)
            yield f"{inside}.self_attn.o_proj.weight", (width, width)
            yield f"{inside}.mlp.gate_proj.weight", (self.hidden, width)
            yield f"{inside}.mlp.up_proj.weight", (self.hidden, width)
            yield f"{inside}.mlp.down_proj.weight", (width, self.hidden)
            yield f"{inside}.input_layernorm.weight", (width,)
            yield f"{inside}.post_attention_layernorm.weight", (width,)
        yield "model.norm.weight", (width,)
        yield "lm_head.weight", (self.vocabulary, width)


def _norm(name: str, width: int) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _affine(name: str, inputs: int, outputs: int) -> Iterator[Named]:
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


_SHAPES: dict[str, _Gpt2 | _Llama] = {
    "gpt2": _Gpt2(width=768, layers=12),
    "gpt2-xl": _Gpt2(width=1600, layers=48),
    "llama-7b": _Llama(width=4096, layers=32, hidden=11008, key_width=4096),
    "llama-70b": _Llama(width=8192, layers=80, hidden=28672, key_width=1024),
}
NAMED_SHAPES = tuple(_SHAPES)


def parameters_of(name: str) -> list[Named]:
    """The names and shapes of a named model's parameters, in the order in which it defines them."""
    return list(_SHAPES[name].parameters())
