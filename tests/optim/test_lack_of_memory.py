"""Too little memory on one rank, in what all ranks do together: one error on all of them, and nothing is kept."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoint_setups import SETUPS, whole
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_state_dict
from zerostep.comm import stream
from zerostep.zero import _broadcast_object

WAYS = pytest.mark.parametrize("way", ["elements", "zero"])


def _fails(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@contextmanager
def _no_scratch() -> Iterator[None]:
    with mock.patch.object(stream.Scratch, "reserve", _fails):
        yield


@contextmanager
def _no_tensors() -> Iterator[None]:
    real = torch.empty_strided

    def allocate(*args: Any, device: Any, **kwargs: Any) -> Tensor:
        return real(*args, device=device, **kwargs) if str(device) == "meta" else _fails()

    with mock.patch("torch.empty_strided", allocate):
        yield


@contextmanager
def _no_copies() -> Iterator[None]:
    real = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _fails() if kwargs.get("copy") else real(self, *args, **kwargs)

    with mock.patch.object(Tensor, "to", to):
        yield


@contextmanager
def _no_memory_to_write() -> Iterator[None]:
    with mock.patch("zerostep.checkpoint.save.write_tensors", _fails):
        yield


def _no_thread(name: str) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def block() -> Iterator[None]:
        real = Thread.start

        def start(self: Thread) -> None:
            if self.name == name:
                raise RuntimeError("can't start new thread")
            real(self)

        with mock.patch.object(Thread, "start", start):
            yield

    return block


PLACES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "tensors": _no_tensors,
    "scratch": _no_scratch,
    "copies": _no_copies,
    "writing": _no_memory_to_write,
    "background thread": _no_thread("zerostep-save"),
    "writing thread": _no_thread("zerostep-write"),
}


def _text(group: ProcessGroup, place: str, failing: int, kind: type[Exception], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        if dist.get_rank(group) == failing:
            with PLACES[place]():
                act()
        else:
            act()
    return str(caught.value)


# Consolidation.


def _consolidation(group: ProcessGroup, way: str, place: str, failing: int) -> str:
    setup = SETUPS["adamw"]
    pair = setup.make(group, way)
    setup.train(pair, group)
    text = _text(group, place, failing, MemoryError, lambda: pair[1].consolidate_state_dict(to=0))
    assert pair[1]._all_state_dicts == []
    before = whole(pair[1])
    setup.train(pair, group, 1)
    assert len(whole(pair[1])["state"]) == len(before["state"])
    return text


@WAYS
@pytest.mark.parametrize(("place", "failing"), [("tensors", 0), ("copies", 0), ("scratch", 0), ("scratch", 2)])
def test_a_rank_without_memory_ends_a_consolidation(pool: Pool, way: str, place: str, failing: int) -> None:
    for rank, text in enumerate(pool.run(_consolidation, 3, way, place, failing, deadline=25)):
        assert text.startswith(f"rank {failing} " + ("has no memory" if rank == failing else "failed, so no rank"))
        assert f"rank {failing} has no memory for" in text and "can't allocate memory" in text


def _broadcast(group: ProcessGroup) -> str:
    value = {"weights": torch.ones(5), "more": [torch.zeros(3, dtype=torch.float64)]}
    act = lambda: _broadcast_object(value, dist.get_global_rank(group, 0), group)  # noqa: E731
    text = _text(group, "tensors", 1, MemoryError, act)
    assert torch.equal(act()["weights"], torch.ones(5))
    return text


def test_a_rank_without_memory_ends_a_broadcast(pool: Pool) -> None:
    for text in pool.run(_broadcast, 3, deadline=25):
        assert "rank 1 has no memory for 44 bytes" in text and "can't allocate memory" in text


# Saves in the background.


def _save(group: ProcessGroup, path: str, way: str, place: str, failing: int) -> str:
    setup = SETUPS["adamw"]
    pair = setup.make(group, way)
    setup.train(pair, group)
    zerostep.save(f"{path}/first", pair[1])
    before = whole(pair[1])

    def save() -> None:
        pending = zerostep.save(f"{path}/second", pair[1], wait=False)
        assert pending is not None
        pending.wait()

    text = _text(group, place, failing, zerostep.CheckpointError, save)
    setup.train(pair, group, 1)
    zerostep.save(f"{path}/third", pair[1], wait=False)
    setup.train(pair, group, 1)
    zerostep.load(f"{path}/first", pair[1])
    assert_same_state_dict(whole(pair[1]), before)
    zerostep.load(f"{path}/third", pair[1])
    return text


@WAYS
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("place", ["copies", "writing", "background thread", "writing thread"])
def test_a_rank_that_cannot_save_in_the_background(
    pool: Pool, tmp_path: Path, way: str, place: str, failing: int
) -> None:
    cause = "can't start new thread" if "thread" in place else "can't allocate memory"
    for text in pool.run(_save, 2, str(tmp_path), way, place, failing, deadline=25):
        assert cause in text and f"rank {failing}" in text and "intact" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "third"]
