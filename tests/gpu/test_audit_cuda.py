"""Audits on a CUDA device: digests in stream order, found by all ranks in the same step, and no host waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import ProcessGroup

from tests.helpers import audited
from tests.helpers.audited import EVERY, WAYS, WITH_MASTERS, Audited
from tests.helpers.cuda_training import DEADLINE, DEVICE, LATE
from tests.helpers.pool import Pool
from zerostep.state.audit import LOOKED_AT_AFTER
from zerostep.state.digest import Summand, counts, digests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
VERY_LATE = 20 * LATE
CUDA = "cuda:0"


def test_digests_are_those_of_host_memory() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [1, 1000, 1024, 70_001, (1 << 23) + 5, 3]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float32, torch.float32, torch.complex64]
    tensors = [torch.randn(size, generator=random).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    expected = digests((Summand(*each) for each in enumerate(tensors)), len(tensors), torch.device("cpu"))
    # Some on the host and some on the device, as in a model with both.
    mixed = [each if index % 3 == 0 else each.to(DEVICE) for index, each in enumerate(tensors)]
    torch.cuda._sleep(LATE)
    found = digests((Summand(*each) for each in enumerate(mixed)), len(tensors), DEVICE)
    assert found.tolist() == expected.tolist()
    flags = [Summand(0, torch.ones(70_001, dtype=torch.bool, device=DEVICE)), Summand(1, tensors[4].to(DEVICE) > 0)]
    assert counts(flags, 2, DEVICE).tolist() == [70_001, int((tensors[4] > 0).sum())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["layers.0.weight", "layers.5.bias", "frozen"])
def test_a_bit_of_a_parameter(pool: Pool, way: str, name: str) -> None:
    for text in pool.run(audited.found_by_hand, 2, CUDA, way, name, deadline=DEADLINE):
        assert f"the audit after step 2 found that rank 0 and rank 1 differ in parameter '{name}'" in text


@pytest.mark.parametrize("way", [*WAYS, *WITH_MASTERS])
def test_an_audit_every_so_many_steps(pool: Pool, way: str) -> None:
    """All ranks raise in the same step, which is a known number of steps later."""
    for text, step in pool.run(audited.found_regularly, 2, CUDA, way, deadline=DEADLINE):
        assert f"the audit after step {EVERY} found that rank 0 and rank 1 differ in parameter 'frozen'" in text
        assert step == EVERY + LOOKED_AT_AFTER


@pytest.mark.parametrize("way", [*WAYS, *WITH_MASTERS])
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_found_where_nothing_is_wrong(pool: Pool, world: int, way: str) -> None:
    pool.run(audited.nothing_found, world, CUDA, way, deadline=DEADLINE)


@pytest.mark.parametrize("call", ["save", "consolidate", "audit"])
@pytest.mark.parametrize("way", ["zero", "bare scatter", "ddp all bf16"])
def test_what_the_last_steps_have_found(pool: Pool, tmp_path: Path, way: str, call: str) -> None:
    for text in pool.run(audited.found_at_the_end, 2, CUDA, way, tmp_path / "saved", call, deadline=DEADLINE):
        assert "the audit after step 3 found that rank 0 and rank 1 differ in parameter 'frozen'" in text
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("way", WITH_MASTERS)
def test_a_master_that_its_parameter_does_not_come_from(pool: Pool, way: str) -> None:
    for text in pool.run(audited.wrong_master, 2, CUDA, way, deadline=DEADLINE):
        assert "on rank 1, which owns them, 1 elements of parameter" in text


@pytest.mark.parametrize("way", ["zero", "bare scatter bf16"])
def test_a_load_replaces_what_an_audit_was_about(pool: Pool, tmp_path: Path, way: str) -> None:
    assert pool.run(audited.loaded_meanwhile, 2, CUDA, way, tmp_path / "saved", deadline=DEADLINE) == [10, 10]


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _never_waits(group: ProcessGroup, way: str) -> None:
    training = Audited(group, CUDA, way, audit_every=1)
    training.train(LOOKED_AT_AFTER + 2)
    for _ in range(2):
        if way != "overlap":
            training.backward()
        torch.cuda.synchronize()
        torch.cuda._sleep(VERY_LATE)
        done = torch.cuda.Event()
        done.record()
        with _waiting_forbidden():
            training.backward() if way == "overlap" else training.optimizer.step()
        assert not done.query(), "the host has waited for the device"
    torch.cuda.synchronize()


@pytest.mark.parametrize("way", [*WAYS, *WITH_MASTERS])
@pytest.mark.parametrize("world", [1, 2])
def test_the_host_does_not_wait_for_the_device_in_an_audited_step(pool: Pool, world: int, way: str) -> None:
    pool.run(_never_waits, world, way, deadline=DEADLINE)
