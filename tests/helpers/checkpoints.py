"""Training with known results at every step, and tools to damage checkpoints."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer, hook_with_zero_step

KINDS = ("zero", "sharded", "overlap")
MESHED = 4  # ranks of a mesh of two by two
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
SMALL_BUCKETS = 0.004  # megabytes

Body = dict[str, Any]


class Known(nn.Module):
    """Gradients depend on the number of the step alone: every world that is a power of two trains it to equal bits."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.words = nn.Embedding(13, 7)
            self.wide = nn.Linear(29, 41)
            self.wider = nn.Linear(31, 43)
            self.norm = nn.BatchNorm1d(7)
            self.last = nn.Linear(7, 13)
            self.last.weight = self.words.weight

    def forward(self, step: int) -> Tensor:
        """A loss with known gradients."""
        generator = torch.Generator().manual_seed(step)
        assert isinstance(self.norm.running_mean, Tensor)
        self.norm.running_mean.add_(step)
        terms = [_product(param, torch.randn(param.shape, generator=generator)) for param in self.parameters()]
        return torch.stack(terms).sum()


def _product(param: Tensor, factors: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return (param * factors).sum()
    total = (param * distribute_tensor(factors, param.device_mesh, param.placements)).sum()
    return total.full_tensor() if isinstance(total, DTensor) else total


def make(group: ProcessGroup, kind: str) -> tuple[nn.Module, Any]:
    """A model and an optimizer of ours for it, of one of `KINDS` or "mesh", two by two of four ranks."""
    model = Known()
    if kind == "mesh" and dist.get_world_size(group) == MESHED:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer, placement in ((model.wide, Shard(0)), (model.wider, Shard(1))):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [placement]))
        return model, ShardedOptimizer(model, AdamW, process_group=mesh["dp"], bucket_mb=SMALL_BUCKETS, **OPTIONS)
    if kind == "mesh":
        kind = "sharded"
    if kind == "sharded":
        return model, ShardedOptimizer(model, AdamW, process_group=group, bucket_mb=SMALL_BUCKETS, **OPTIONS)
    named = list(model.named_parameters())
    if kind == "zero":
        return model, ZeroRedundancyOptimizer(named, AdamW, group, **OPTIONS)
    ddp = DDP(model, process_group=group, bucket_cap_mb=SMALL_BUCKETS, broadcast_buffers=False)
    zero = ZeroRedundancyOptimizer(named, AdamW, group, overlap_with_ddp=True, **OPTIONS)
    ddp.register_comm_hook(group, hook_with_zero_step(allreduce_hook, ddp, zero))
    return ddp, zero


def advance(model: nn.Module, optimizer: Any, step: int) -> None:
    """Do the step of this number, counted from 1."""
    optimizer.zero_grad()
    model(step).backward()
    optimizer.step()


def plain(steps: int) -> tuple[Known, AdamW]:
    """The model and a plain optimizer after the first steps."""
    model = Known()
    optimizer = AdamW(list(model.named_parameters()), **OPTIONS)
    for step in range(1, steps + 1):
        advance(model, optimizer, step)
    return model, optimizer


def whole_state(optimizer: Any) -> dict[str, Any]:
    """The whole state, on every rank."""
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found: dict[str, Any] = optimizer.state_dict()
    state = {index: {key: _undivided(value) for key, value in each.items()} for index, each in found["state"].items()}
    return found | {"state": state}


def _undivided(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_trained(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Fail unless model and optimizer are, in every bit, what these steps make of them."""
    expected_model, expected = plain(steps)
    found = {key: _undivided(value) for key, value in bare(model).state_dict().items()}
    assert_same_bits(found, expected_model.state_dict())
    assert_same_state_dict(whole_state(optimizer), expected.state_dict())


def bare(model: nn.Module) -> nn.Module:
    """The model without DDP."""
    return model.module if isinstance(model, DDP) else model


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """A copy of all that a load could change on this rank."""
    state = [{key: _copy(value) for key, value in entry.items()} for entry in optimizer.state.values()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    weights = {key: value.clone() for key, value in bare(model).state_dict().items()}
    return {"state": state, "groups": groups, "model": weights}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# Damage.


def digest(text: bytes) -> str:
    """A SHA-256."""
    return hashlib.sha256(text).hexdigest()


def signed(body: Any) -> bytes:
    """A manifest of this body, with the right checksum of its own."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sha256": digest(text.encode()), "manifest": body}).encode()


def body_of(path: Path) -> Body:
    """The body of a checkpoint's manifest."""
    body: Body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    return body


def edit(path: Path, change: Callable[[Body], object]) -> None:
    """Change a manifest and sign it again."""
    body = body_of(path)
    change(body)
    (path / "manifest.json").write_bytes(signed(body))


def sign_files(path: Path) -> None:
    """Write the present sizes and checksums of the files into the manifest."""

    def change(body: Body) -> None:
        for file in body["files"]:
            text = (path / file["name"]).read_bytes()
            file.update(bytes=len(text), sha256=digest(text))

    edit(path, change)


def with_header(text: bytes, change: Callable[[Body, Body], object]) -> bytes:
    """A file of tensors with another header; `change` gets the header and what zerostep has put into it."""
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    about = json.loads(header["__metadata__"]["zerostep"])
    change(header, about)
    if isinstance(header.get("__metadata__"), Mapping) and "zerostep" in header["__metadata__"]:
        header["__metadata__"] = {**header["__metadata__"], "zerostep": json.dumps(about)}
    return joined(json.dumps(header).encode(), text[8 + size :])


def joined(header: bytes, data: bytes) -> bytes:
    """A file of tensors from the text of its header and the bytes of its tensors."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data
