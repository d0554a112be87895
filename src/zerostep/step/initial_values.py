"""Equal values on all ranks before the first step: a broadcast from rank 0, and what ranks compare before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from zerostep.comm import stream
from zerostep.comm.agreement import Fact
from zerostep.comm.mesh import Ranks
from zerostep.dtensors import describe_placements, local_of, locals_of
from zerostep.plan.groups import param_specs
from zerostep.plan.layout import ParamSpec
from zerostep.tensors import is_dense

Titled = tuple[str, Tensor]


def tensors_of(model: nn.Module, specs: Sequence[ParamSpec], params: Sequence[Tensor]) -> list[Titled]:
    """Parameters and buffers of a model, then those of `params` that it does not have, each with a title."""
    of_model = _titled(model)
    known = {id(tensor) for _, tensor in of_model}
    others = zip(specs, params, strict=True)
    return [
        *of_model,
        *((f"parameter {spec.name!r}", param) for spec, param in others if id(param) not in known),
    ]


def tensors_beside(model: nn.Module, own: Collection[int], grouped: Collection[int]) -> list[Titled]:
    """All tensors of those modules whose parameters are `own`, with titles: buffers, and what is not trained, too.

    Both are ids; `grouped` are all parameters that some group has.
    """
    found: dict[int, Titled] = {}
    for prefix, module in model.named_modules():
        members = {id(param) for param in module.parameters()}.intersection(grouped)
        if members and members <= set(own):
            found |= {id(tensor): (title, tensor) for title, tensor in _titled(module, prefix)}
    return list(found.values())


def _titled(module: nn.Module, prefix: str = "") -> list[Titled]:
    params, buffers = module.named_parameters(prefix), module.named_buffers(prefix)
    return [
        *((f"parameter {name!r}", param) for name, param in params),
        *((f"buffer {name!r}", buffer) for name, buffer in buffers),
    ]


def broadcast_facts(tensors: Sequence[Titled]) -> list[Fact]:
    """What must be equal on all ranks before a broadcast, which pairs tensors by their order alone."""
    titles, values = [title for title, _ in tensors], [tensor for _, tensor in tensors]
    specs = param_specs([{"params": values, "param_names": titles}])
    facts = [
        Fact(f"tensor {index} of the model", _describe(spec, tensor))
        for index, (spec, tensor) in enumerate(zip(specs, values, strict=True))
    ]
    return [*facts, Fact(f"tensor {len(facts)} of the model", "nothing")]


def _describe(spec: ParamSpec, tensor: Tensor) -> str:
    memory, placements = local_of(tensor), describe_placements(tensor)
    strides = f", strides {memory.stride()}" if memory.layout == torch.strided and is_dense(memory) else ""
    whole = f", {placements}" if placements else ""
    return f"{spec.name}, shape {spec.shape}, {spec.dtype}, on {spec.device}{strides}{whole}"


def broadcast_values(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, across the replicas and then inside each of them. A collective."""
    tensors = locals_of(tensors)
    copies = [tensor.detach() if is_dense(tensor) else tensor.detach().contiguous() for tensor in tensors]
    with torch.no_grad():
        for transport in (ranks.replicas, ranks.shards):
            stream.broadcast(transport, copies, 0)
        for tensor, copy in zip(tensors, copies, strict=True):
            if not is_dense(tensor):
                _distinct(tensor.detach()).copy_(_distinct(copy, tensor))


def _distinct(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Each element of memory once: an expanded tensor shows some of them many times."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
