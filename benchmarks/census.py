"""What can be counted of an entry: the calls its backend gets in a step, the updates it loses, the memory it takes."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

from benchmarks.memory import PeakWatch
from benchmarks.peers.trainer import Trainer

_BACKENDS = ("gloo:", "nccl:")
_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv", "recvAnySource", "recv_any_source")


def calls_in(action: Callable[[], object]) -> dict[str, int]:
    """Run ``action`` and count this rank's collectives and the messages it sends to one rank.

    Every backend announces each of its works to the profiler, whoever asked for it and from whatever thread; a receive
    is the other side's send.
    """
    only = {RecordScope.USER_SCOPE}  # with every operator of a large model, reading the profile takes ages
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    config = ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, every_thread)
    _autograd._prepare_profiler(config, {ProfilerActivity.CPU})
    _autograd._enable_profiler(config, {ProfilerActivity.CPU}, only)  # type: ignore[call-arg,unused-ignore]
    try:
        action()
    finally:
        found = _autograd._disable_profiler()
    return sorted_calls(event.name() for event in found.events())


def sorted_calls(names: Iterable[str]) -> dict[str, int]:
    """The profiler's names as numbers of collectives and of messages."""
    kinds = Counter(_kind(name) for name in names if name.startswith(_BACKENDS))
    return {"collectives": kinds["collective"], "messages": kinds["message"]}


def _kind(name: str) -> str:
    operation = name.partition(":")[2].split()[0]
    if operation in _RECEIVES:
        return "receive"
    return "message" if operation in _SENDS else "collective"


@dataclass(frozen=True)
class FirstSteps:
    """How many steps went by before one changed the parameters, and by how many bytes resident memory grew."""

    lost: int
    growth: int | None


def first_steps(make: Callable[[], Trainer], data: Tensor, least: int, most: int) -> tuple[Trainer, FirstSteps]:
    """Build a trainer and take ``least`` steps, or up to ``most`` until one changes the parameters; collective."""
    watch = PeakWatch()
    trainer: Trainer = watch.run(make)
    before, lost, taken = _sums(trainer), 0, 0
    while taken < least or (lost == taken < most):
        watch.run(partial(_one_step, trainer, data))
        taken += 1
        if lost == taken - 1 and torch.equal(before, _sums(trainer)):
            lost = taken
    return trainer, FirstSteps(lost, watch.growth)


def _one_step(trainer: Trainer, data: Tensor) -> None:
    trainer.step(data)
    trainer.settle()


def _sums(trainer: Trainer) -> Tensor:
    """One sum for each parameter: an update changes some of them."""
    return torch.stack([parameter.sum(dtype=torch.float64) for parameter in trainer.full_parameters()])
