"""The parameters of the models that `zerostep plan` knows by name, from their published sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

NamedShape = tuple[str, tuple[int, ...]]


def _gpt2(width: int, layers: int, vocabulary: int = 50257, context: int = 1024) -> Iterator[NamedShape]:
    """GPT-2: learned positions, biases everywhere, and the embedding as head."""
    yield "transformer.wte.weight", (vocabulary, width)
    yield "transformer.wpe.weight", (context, width)
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        yield from _norm(f"{block}.ln_1", width)
        yield from _affine(f"{block}.attn.c_attn", width, 3 * width)
        yield from _affine(f"{block}.attn.c_proj", width, width)
        yield from _norm(f"{block}.ln_2", width)
        yield from _affine(f"{block}.mlp.c_fc", width, 4 * width)
        yield from _affine(f"{block}.mlp.c_proj", 4 * width, width)
    yield from _norm("transformer.ln_f", width)


def _llama(width: int, layers: int, hidden: int, key_width: int, vocabulary: int = 32000) -> Iterator[NamedShape]:
    """Llama: no biases, a separate head, and fewer heads for keys and values in the large models."""
    yield "model.embed_tokens.weight", (vocabulary, width)
    for layer in range(layers):
        block = f"model.layers.{layer}"
        yield f"{block}.self_attn.q_proj.weight", (width, width)
        yield f"{block}.self_attn.k_proj.weight", (key_width, width)
        yield f"{block}.self_attn.v_proj.weight", (key_width, width)
        yield f"{block}.self_attn.o_proj.weight", (width, width)
        yield f"{block}.mlp.gate_proj.weight", (hidden, width)
        yield f"{block}.mlp.up_proj.weight", (hidden, width)
        yield f"{block}.mlp.down_proj.weight", (width, hidden)
        yield f"{block}.input_layernorm.weight", (width,)
        yield f"{block}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


def _norm(name: str, width: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _affine(name: str, inputs: int, outputs: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


# Names and shapes of the parameters, in the order in which the model defines them.
NAMED_SHAPES: Mapping[str, Callable[[], Iterator[NamedShape]]] = {
    "gpt2": lambda: _gpt2(width=768, layers=12),
    "gpt2-xl": lambda: _gpt2(width=1600, layers=48),
    "llama-7b": lambda: _llama(width=4096, layers=32, hidden=11008, key_width=4096),
    "llama-70b": lambda: _llama(width=8192, layers=80, hidden=28672, key_width=1024),
}


# How Megatron divides these models over ranks of tensor parallelism: embeddings and heads by words, the first matrix of
# a pair by its outputs, the second by its inputs. GPT-2 has (inputs, outputs), Llama (outputs, inputs).
_DIVIDED: Mapping[int, tuple[str, ...]] = {
    0: (
        *("wte.weight", "c_attn.bias", "c_fc.bias", "c_proj.weight"),
        *("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight"),
        *("gate_proj.weight", "up_proj.weight", "lm_head.weight"),
    ),
    1: ("c_attn.weight", "c_fc.weight", "o_proj.weight", "down_proj.weight"),
}


def divided_dimension(name: str) -> int | None:
    """Return the dimension in which tensor parallelism divides a parameter; `None` if every rank has all of it."""
    return next((dim for dim, endings in _DIVIDED.items() if name.endswith(endings)), None)
