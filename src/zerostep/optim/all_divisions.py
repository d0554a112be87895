"""The state and the numbers of all divisions of an optimizer together, in the order of the user's parameter groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from zerostep.optim.division import Division
from zerostep.plan.groups import NOT_OF_CLASS, Group, all_params, options
from zerostep.plan.layout import ParamSpec
from zerostep.state.consolidate import pack_groups
from zerostep.state.load_state_dict import validate
from zerostep.state.missing import complete_state_dict, refuse_missing
from zerostep.state.param_state import StateDict
from zerostep.step.labels import PhaseTimer
from zerostep.step.stats import Stats
from zerostep.step.training_step import TrainingStep

_DIVISION = "division"  # in a collected part of the state: the number of the division that it is of


def collect_state(divisions: Sequence[Division], to: int) -> list[Any]:
    """Every rank's part of the state, on rank `to`, of those divisions that it belongs to; empty on other ranks."""
    parts: list[Any] = []
    for number, division in enumerate(divisions):
        if to in division.members:
            found = division.state.collect(division.position_of(to))
            parts += [{**part, _DIVISION: number} for part in found]
    return parts


def consolidated(divisions: Sequence[Division], groups: Sequence[Group], parts: Sequence[Any]) -> StateDict:
    """What was collected, as one state dict."""
    state = dict[Any, Any]()
    for number, division in enumerate(divisions):
        state |= division.assembled([part for part in parts if part[_DIVISION] == number])
    state = dict(sorted(state.items()))
    for part in reversed(parts):  # under a name, the lowest rank's value is kept
        state |= part["by_name"]
    packed = [{k: v for k, v in group.items() if k not in NOT_OF_CLASS} for group in pack_groups(groups)]
    return complete_state_dict(state, packed)


def load_whole(
    divisions: Sequence[Division],
    groups: Sequence[Group],
    training: TrainingStep,
    state_dict: StateDict,
    allow_missing: bool,
) -> None:
    """Replace state and options by this rank's part of a state dict, or raise and change nothing."""
    numbers = validate(state_dict, groups, group_optimizers(divisions, groups), {})
    if not allow_missing:
        refuse_missing(
            state_dict, numbers, _all_specs(divisions), all_params(groups), divisions[0].state.group_optimizer
        )
    saved = {numbers[key]: dict(entry) for key, entry in state_dict["state"].items() if key in numbers}
    named = {key: value for key, value in state_dict["state"].items() if key not in numbers}
    chosen = [options(dict(group)) for group in state_dict["param_groups"]]
    training.recover()
    for replace in [division.prepare_load(saved, named, chosen) for division in divisions]:
        replace()
    training.loaded(bool(saved))


def group_optimizers(divisions: Sequence[Division], groups: Sequence[Group]) -> list[Optimizer]:
    """The inner optimizer of each group."""
    owners = [next(each for each in divisions if each.owns(number)) for number in range(len(groups))]
    return [division.part.inners.of(number) for number, division in enumerate(owners)]


def _all_specs(divisions: Sequence[Division]) -> list[ParamSpec]:
    """The specs of all parameters, in their order."""
    pairs = (zip(division.numbers(), division.layout.params, strict=True) for division in divisions)
    return [spec for _, spec in sorted((pair for each in pairs for pair in each), key=lambda pair: pair[0])]


def stats_of(divisions: Sequence[Division], steps: int, timer: PhaseTimer) -> Stats:
    """Bytes moved and held, time waited and how even the shares are, of all divisions together."""
    engines, layouts = [each.engine for each in divisions], [each.layout for each in divisions]
    positions, ranks = [each.ranks.shards.rank for each in divisions], divisions[0].ranks.shards
    loads = [[layout.load(rank) for rank in range(layout.world_size)] for layout in layouts]
    even = sum(sum(each) / len(each) for each in loads)
    sent, received = zip(*(engine.traffic() for engine in engines), strict=True)
    compiled = [engine.compiled for engine in engines if engine.compiled is not None]
    with engines[0].lock:  # another thread may be training
        gradient_bytes = sum(engine.gradient_bytes for engine in engines)
        state_bytes = sum(each.state.nbytes() for each in divisions)
    return Stats(
        steps=steps,
        rank=ranks.rank,
        world_size=ranks.world_size,
        buckets=sum(len(layout.buckets) for layout in layouts),
        elements=sum(map(sum, loads)),
        owned_elements=sum(each[rank] for each, rank in zip(loads, positions, strict=True)),
        imbalance=sum(map(max, loads)) / even if even else 0.0,
        bytes_sent=sum(sent),
        bytes_received=sum(received),
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        compiled_graphs=sum(each.graphs for each in compiled),
        compile_seconds=sum(each.seconds for each in compiled),
        wait_seconds=timer.wait_seconds,
    )
