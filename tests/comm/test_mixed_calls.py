"""Ranks that do not make the same calls wait, or raise: no message may meet memory that is too short for it."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import zerostep
from tests.helpers.pool import Outcome, Pool, run_fresh
from zerostep.comm.exchange import connect as connect_exchange
from zerostep.comm.transport import CompanionTransport, Transport, calling, connect, message_tag, wire_tag
from zerostep.errors import StepMismatchError, TransportError
from zerostep.plan.layout import Bucket, Slot, Span

HOST = torch.device("cpu")
SHORT = timedelta(seconds=1)


def _impatient(group: dist.ProcessGroup) -> Transport:
    """A companion whose waits end after a second."""
    store = distributed_c10d.PrefixStore("impatient", distributed_c10d._get_default_store())
    return CompanionTransport.connect(store, dist.get_rank(group), dist.get_world_size(group), SHORT)


def _bucket(first: int, size: int, world: int) -> Bucket:
    cuts = tuple(size * rank // world for rank in range(world + 1))
    return Bucket("float32", "cpu:0", True, (Slot(first, Span(0, size), 0),), cuts)


def _mixed(group: dist.ProcessGroup, kind: str) -> str:
    exchange = connect_exchange(connect(group), HOST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_transport", _impatient(group))
        late = dist.get_rank(group) == 1
        with pytest.raises(TransportError) as caught:
            if kind == "integers":
                exchange.start_all_gather_ints([1] * (1 + 4 * late)).wait()
            elif kind == "buckets":
                bucket = _bucket(int(late), 100 + 900 * late, 2)
                exchange.reduce(torch.ones(bucket.size), bucket).finish()
            else:
                # As after an interrupt between two messages of one bucket: the second meets the receive of the first.
                bucket = _bucket(0, 100, 2)
                wide = torch.float64 if late else torch.float32
                exchange.gather(torch.ones(bucket.size, dtype=wide), bucket).wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["integers", "buckets", "dtypes"])
def test_messages_of_different_length_never_meet(kind: str) -> None:
    outcomes = run_fresh(_mixed, 2, kind)
    assert [outcome.error for outcome in outcomes] == [None, None], _texts(outcomes)
    assert all("Timed out" in outcome.result or "closed" in outcome.result for outcome in outcomes)


def _texts(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{outcome.exitcode}: {outcome.error}" for outcome in outcomes)


def test_tags_differ_with_kind_bucket_piece_and_length() -> None:
    tags = {
        wire_tag(message_tag(kind, bucket, piece), nbytes)
        for kind in (0x7A65, 0x7A66, 0x7A70, 0x7A71, 0x7A72)
        for bucket in range(20)
        for piece in range(5)
        for nbytes in (4, 8, 16, 4 << 20)
    }
    assert len(tags) == 5 * 20 * 5 * 4
    assert all(0 <= tag < 1 << 31 for tag in tags)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def _different_calls(group: dist.ProcessGroup, directory: str) -> str:
    model = _model()
    optimizer = zerostep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group)
    calls: list[Callable[[], object]] = [
        lambda: zerostep.save(Path(directory, "one"), optimizer),
        lambda: optimizer.consolidate_state_dict(),
    ]
    with pytest.raises(StepMismatchError) as caught:
        calls[dist.get_rank(group)]()
    optimizer.consolidate_state_dict()  # all ranks can go on
    return str(caught.value)


def test_ranks_in_different_calls_raise_and_can_go_on(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(_different_calls, 2, str(tmp_path))
    assert first == second
    assert "rank 0 is in save" in first and "rank 1 in consolidate_state_dict" in first


def _rows(group: dist.ProcessGroup, companion: bool) -> None:
    transport = connect(group).companion() if companion else connect(group)
    rank, ranks = transport.rank, range(transport.world_size)
    for count in (0, 1, 63, 64, 65, 500):
        assert transport.all_gather_ints([rank - 1] * count) == [[other - 1] * count for other in ranks]
    with pytest.raises(StepMismatchError, match="of 2 numbers"):
        transport.all_gather_ints([0] * (2 if rank == 0 else 100))
    with (
        calling("one") if rank == 0 else calling("another"),
        pytest.raises(StepMismatchError, match="rank 1 in another"),
    ):
        transport.all_gather_ints([0])
    with calling("one"):
        assert transport.all_gather_ints([rank]) == [[other] for other in ranks]


@pytest.mark.parametrize("companion", [False, True])
def test_rows_of_any_length(pool: Pool, companion: bool) -> None:
    pool.run(_rows, 2, companion)
