"""The parameters of the models that `zerostep plan` knows by name, from their published sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["NAMED_SHAPES", "parameters_of"]

NamedShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Gpt2:
    """GPT-2: learned positions, biases everywhere, and the embedding as head."""

    width: int
    layers: int
    vocabulary: int = 50257
    context: int = 1024

    def parameters(self) -> Iterator[NamedShape]:
        width = self.width
        yield "transformer.wte.weight", (self.vocabulary, width)
        yield "transformer.wpe.weight", (self.context, width)
        for layer in range(self.layers):
            block = f"transformer.h.{layer}"
            yield from _norm(f"{block}.ln_1", width)
            yield from _affine(f"{block}.attn.c_attn", width, 3 * width)
            yield from _affine(f"{block}.attn.c_proj", width, width)
            yield from _norm(f"{block}.ln_2", width)
            yield from _affine(f"{block}.mlp.c_fc", width, 4 * width)
            yield from _affine(f"{block}.mlp.c_proj", 4 * width, width)
        yield from _norm("transformer.ln_f", width)


@dataclass(frozen=True)
class _Llama:
    """Llama: no biases, a separate head, and fewer heads for keys and values in the large models."""

    width: int
    layers: int
    hidden: int
    key_width: int
    vocabulary: int = 32000

    def parameters(self) -> Iterator[NamedShape]:
        width = self.width
        yield "model.embed_tokens.weight", (self.vocabulary, width)
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            yield f"{block}.self_attn.q_proj.weight", (width, width)
            yield f"{block}.self_attn.k_proj.weight", (self.key_width, width)
            yield f"{block}.self_attn.v_proj.weight", (self.key_width, width)
            yield f"{block}.self_attn.o_proj.weight", (width, width)
            yield f"{block}.mlp.gate_proj.weight", (self.hidden, width)
            yield f"{block}.mlp.up_proj.weight", (self.hidden, width)
            yield f"{block}.mlp.down_proj.weight", (width, self.hidden)
            yield f"{block}.input_layernorm.weight", (width,)
            yield f"{block}.post_attention_layernorm.weight", (width,)
        yield "model.norm.weight", (width,)
        yield "lm_head.weight", (self.vocabulary, width)


def _norm(name: str, width: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _affine(name: str, inputs: int, outputs: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


_SHAPES: dict[str, _Gpt2 | _Llama] = {
    "gpt2": _Gpt2(width=768, layers=12),
    "gpt2-xl": _Gpt2(width=1600, layers=48),
    "llama-7b": _Llama(width=4096, layers=32, hidden=11008, key_width=4096),
    "llama-70b": _Llama(width=8192, layers=80, hidden=28672, key_width=1024),
}
NAMED_SHAPES = tuple(_SHAPES)


def parameters_of(name: str) -> list[NamedShape]:
    """Return the names and shapes of a named model's parameters, in the order in which it defines them."""
    return list(_SHAPES[name].parameters())
