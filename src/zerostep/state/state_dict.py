"""The state of all ranks as one `torch.optim` state dict, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zerostep.comm.objects import copy_object, gather_object
from zerostep.comm.transport import Transport
from zerostep.plan.groups import Group

__all__ = ["collect", "local_shard", "merge", "merge_shards", "pack_groups"]

StateDict = dict[str, Any]


def collect(transport: Transport, inner: Optimizer, index_of: Mapping[Tensor, int], to: int) -> list[StateDict]:
    """The state dict of every rank's inner optimizer, keyed by global index, on rank `to`; nothing elsewhere."""
    return gather_object(transport, lambda: _shard(inner, index_of), to)


def merge(shards: Sequence[StateDict], groups: Sequence[Group]) -> StateDict:
    """What the unsharded optimizer's `state_dict()` would return."""
    entries = [item for shard in reversed(shards) for item in shard["state"].items()]
    # Parameters by number, then whatever else an optimizer keeps, by name; the lowest rank's word counts there.
    state = dict(sorted(dict(entries).items(), key=lambda item: (isinstance(item[0], str), item[0])))
    return {"state": state, "param_groups": pack_groups(groups)}


def local_shard(
    inner: Optimizer, index_of: Mapping[Tensor, int], groups: Sequence[Group], rank: int, world_size: int
) -> StateDict:
    """One rank's part of the whole state, marked as a part, as a copy in host memory."""
    part = copy_object(_shard(inner, index_of))
    owned = [group["params"] for group in part["param_groups"]]
    place = {"rank": rank, "world_size": world_size, "owned": owned}
    return {"state": part["state"], "param_groups": pack_groups(groups), "shard": place}


def merge_shards(shards: Sequence[StateDict]) -> StateDict:
    """One state dict in `torch.optim`'s own format from what `local_state_dict()` gave on every rank, in any order.

    It loads into the unsharded optimizer and into a sharded one at any world size. `ValueError` if a part is missing,
    comes twice or belongs to another run.
    """
    places: list[dict[str, Any]] = [shard["shard"] for shard in shards if "shard" in shard]
    if not shards or len(places) != len(shards):
        raise ValueError("merge_shards() takes what local_state_dict() gave on every rank")
    ranks = sorted(place["rank"] for place in places)
    sizes = {place["world_size"] for place in places}
    if len(sizes) != 1 or ranks != list(range(*sizes)):
        raise ValueError(f"these are the shards of ranks {ranks} of {sorted(sizes)}: every rank is needed exactly once")
    owned = sorted(index for place in places for group in place["owned"] for index in group)
    wanted = sorted(index for group in shards[0]["param_groups"] for index in group["params"])
    if owned != wanted:
        raise ValueError("these shards do not cover every parameter exactly once: they belong to different runs")
    ordered = sorted(shards, key=lambda shard: shard["shard"]["rank"])
    return {**merge(ordered, ()), "param_groups": ordered[0]["param_groups"]}


def pack_groups(groups: Sequence[Group]) -> list[Group]:
    """Groups with numbers in place of parameters; one that is listed twice keeps its first number."""
    numbers: dict[Tensor, int] = {}
    for place, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
        numbers.setdefault(param, place)
    return [{**_unbound(group), "params": [numbers[param] for param in group["params"]]} for group in groups]


def _unbound(group: Group) -> Group:
    return {key: list(value) if key == "param_names" else value for key, value in group.items()}


def _shard(inner: Optimizer, index_of: Mapping[Tensor, int]) -> StateDict:
    found = inner.state_dict()
    numbers = {
        local: index_of[param]
        for packed, group in zip(found["param_groups"], inner.param_groups, strict=True)
        for local, param in zip(packed["params"], group["params"], strict=True)
    }
    state = {numbers.get(key, key): value for key, value in found["state"].items()}
    owned = [[numbers[local] for local in packed["params"]] for packed in found["param_groups"]]
    return {"state": state, "param_groups": [{"params": members} for members in owned]}
