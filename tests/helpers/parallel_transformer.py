"""A small transformer with tensor and sequence parallelism and layers of experts, and the same on one process.

The mesh has the dimensions `copies`, `experts` and `tp`. Ranks that differ in the first two train on other batches: the
data-parallel ranks. Experts are divided among those that differ in the second, so they have `copies` replicas; like all
other matrices they are divided over `tp` in addition.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WORDS, WIDTH, HEADS, LENGTH, EXPERTS, LAYERS = 24, 16, 4, 8, 4, 2
DIMENSIONS = ("copies", "experts", "tp")
BATCH = 2  # of one data-parallel rank


class Attention(nn.Module):
    """Causal attention over the heads that are here."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        parts = (part(inputs) for part in (self.query, self.key, self.value))
        # As many heads as this rank has of the width.
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    """Two matrices; also one expert."""

    def __init__(self, hidden: int = 3 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(inputs)))
        return result


class Dispatch(torch.autograd.Function):
    """An equal part of a tensor for each rank of a group; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(inputs, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(inputs: Tensor, group: ProcessGroup) -> Tensor:
    sent = inputs.contiguous()
    result = torch.empty_like(sent)
    dist.all_to_all_single(result, sent, group=group)
    return result


class Experts(nn.Module):
    """Each word goes to its best expert, on whichever rank that is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.members = nn.ModuleDict({str(number): Mlp(2 * WIDTH) for number in range(EXPERTS)})
        self.group: ProcessGroup | None = None

    def divide(self, group: ProcessGroup) -> None:
        """Keep this rank's experts; the others are those of the other ranks of the group."""
        self.group, count = group, EXPERTS // dist.get_world_size(group)
        first = count * dist.get_rank(group)
        for number in range(EXPERTS):
            if not first <= number < first + count:
                del self.members[str(number)]

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs.flatten(0, 1)
        best, expert = F.softmax(self.gate(words), -1).max(-1)
        chosen = F.one_hot(expert, EXPERTS).T.unsqueeze(-1)  # (experts, words, 1)
        found = self._back(self._run(self._send(chosen * words)))
        return ((chosen * found).sum(0) * best.unsqueeze(-1)).view_as(inputs)

    def _send(self, words: Tensor) -> Tensor:
        """From (experts, words here) to (experts here, words of all ranks); zeros where a word is not for an expert."""
        if self.group is None:
            return words
        parts = Dispatch.apply(words, self.group).unflatten(0, (-1, len(self.members)))
        result: Tensor = parts.transpose(0, 1).flatten(1, 2)
        return result

    def _run(self, words: Tensor) -> Tensor:
        return torch.stack([member(part) for member, part in zip(self.members.values(), words, strict=True)])

    def _back(self, results: Tensor) -> Tensor:
        if self.group is None:
            return results
        parts = results.unflatten(1, (dist.get_world_size(self.group), -1)).transpose(0, 1).flatten(0, 1)
        result: Tensor = Dispatch.apply(parts, self.group)
        return result


class Block(nn.Module):
    """Attention, and a layer of experts or an ordinary one."""

    def __init__(self, with_experts: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = Experts() if with_experts else Mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.attention(self.first(inputs))
        result: Tensor = hidden + self.mlp(self.second(hidden))
        return result


class Transformer(nn.Module):
    """A language model; every second block has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(with_experts=number % 2 == 1) for number in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), words[:, 1:].flatten())


def build(dtype: torch.dtype = torch.float64) -> Transformer:
    """The whole model, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Transformer().to(dtype)


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Divide a model: experts over `experts`, matrices over `tp`, activations between them by position over `tp`.

    Where `tp` has one rank, all parameters stay ordinary ones.
    """
    tp = mesh["tp"]
    if tp.size() == 1:
        for experts in (module for module in model.modules() if isinstance(module, Experts)):
            experts.divide(mesh["experts"].get_group())
        return model
    for block in model.blocks:
        _parallelize_block(block, mesh)
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, plan)  # type: ignore[return-value]


def _parallelize_block(block: Any, mesh: DeviceMesh) -> None:
    tp, whole = mesh["tp"], PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "first": SequenceParallel(),
        "second": SequenceParallel(),
        "attention": whole,
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    }
    if isinstance(block.mlp, Experts):
        block.mlp.divide(mesh["experts"].get_group())
        _parallelize_experts(block.mlp, tp)
    else:
        plan |= {"mlp": whole, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(block, tp, plan)


def _parallelize_experts(experts: Experts, tp: DeviceMesh) -> None:
    # Every rank of `tp` routes all words of its batch, and computes its part of each expert.
    for member in experts.members.values():
        parallelize_module(member, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    inward = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True)
    outward = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))
    parallelize_module(experts, tp, inward)
    parallelize_module(experts, tp, outward)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert, of which there are fewer replicas."""
    return ".members." in name


def named(model: nn.Module, experts: bool) -> list[tuple[str, nn.Parameter]]:
    """The parameters of experts, or all others."""
    return [(name, param) for name, param in model.named_parameters() if is_expert(name) == experts]


def batches(replicas: Iterable[int], steps: int) -> list[Tensor]:
    """The batches of some data-parallel ranks, side by side."""
    parts = [_batches(replica, steps) for replica in replicas]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _batches(replica: int, steps: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(replica)
    start = torch.randint(WORDS, (steps, BATCH, 1), generator=random)
    stride = torch.randint(1, 5, (steps, BATCH, 1), generator=random)
    return list((start + stride * torch.arange(LENGTH + 1)) % WORDS)
