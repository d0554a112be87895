"""Traces, synthetic and from the profiler, turned into the phases of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from zerostep.step.labels import stepping_in_backward
from zerostep.tools.errors import TraceError
from zerostep.tools.tracing.chrome import merged
from zerostep.tools.tracing.events import RankTrace, parse, read, sort_by_rank
from zerostep.tools.tracing.intervals import Interval
from zerostep.tools.tracing.picture import check_paths, draw
from zerostep.tools.tracing.step import CommSpan, StepView, Update, common_step, view_step
from zerostep.tools.tracing.worker import StepCounter

HOST, LANE = 7, 8


def entry(name: str, start: float, stop: float, kind: str = "user_annotation", thread: int = HOST) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": stop - start, "pid": 42, "tid": thread}


def op(start: float, stop: float, name: str = "aten::mm", thread: int = HOST) -> dict[str, Any]:
    return entry(name, start, stop, "cpu_op", thread)


def backward(start: float, stop: float) -> dict[str, Any]:
    return op(start, stop, "autograd::engine::evaluate_function: MmBackward0")


def mark(step: int, at: float) -> dict[str, Any]:
    return entry(f"zerostep/end of step {step}", at, at + 1)


def trace(*entries: dict[str, Any], rank: int = 0, base: int = 0) -> RankTrace:
    return parse({"traceEvents": list(entries), "baseTimeNanoseconds": base}, rank)


def step_of(*entries: dict[str, Any]) -> StepView:
    """The step between the moments 1000 and 2000."""
    return view_step(trace(mark(4, 1000), mark(5, 2000), *entries), 5)


def spans(*edges: tuple[float, float]) -> list[Interval]:
    return [Interval(*each) for each in edges]


# ---------------------------------------------------------------------- what is on its way


def test_a_bucket_is_on_its_way_from_its_launch_to_the_end_of_its_wait() -> None:
    found = step_of(entry("zerostep/reduce bucket 3", 1100, 1120), entry("zerostep/reduce bucket 3 wait", 1500, 1600))
    assert found.comm_spans == [CommSpan("reduce", "bucket 3", Interval(1100, 1600), spans((1500, 1600)))]
    assert found.exposed == {"reduce": spans((1500, 1600))}
    assert found.exposed_ms == 0.1


def test_work_inside_a_wait_is_not_waiting() -> None:
    waiting = entry("zerostep/reduce bucket 0 wait", 1500, 1600)
    found = step_of(entry("zerostep/reduce bucket 0", 1100, 1120), waiting, op(1540, 1570, "aten::add"))
    assert found.exposed == {"reduce": spans((1500, 1540), (1570, 1600))}
    assert found.exposed_ms == pytest.approx(0.07)


def test_launches_and_waits_of_one_bucket_are_paired_in_order() -> None:
    found = step_of(
        entry("zerostep/reduce bucket 0", 1100, 1110),
        entry("zerostep/reduce bucket 0", 1200, 1210),
        entry("zerostep/reduce bucket 0 wait", 1300, 1310),
        entry("zerostep/reduce bucket 0 wait", 1400, 1410),
    )
    assert [comm.span for comm in found.comm_spans] == spans((1100, 1310), (1200, 1410))


def test_parameters_are_on_their_way_across_the_edges_of_a_step() -> None:
    found = step_of(
        entry("zerostep/gather bucket 0", 900, 950),
        entry("zerostep/gather bucket 0 wait", 1200, 1250),
        entry("zerostep/gather bucket 0", 1900, 1950),
        op(2500, 2600),
    )
    assert [comm.span for comm in found.comm_spans] == spans((1000, 1250), (1900, 2000))
    assert found.exposed == {"gather": spans((1200, 1250))}


def test_a_wait_whose_launch_was_before_the_trace() -> None:
    found = step_of(entry("zerostep/gather bucket 0 wait", 1200, 1250), entry("zerostep/gather bucket 0", 1900, 1950))
    assert [comm.span for comm in found.comm_spans] == spans((1000, 1250), (1900, 2000))


def test_a_phase_that_is_only_waited_for_lasts_as_long_as_the_wait() -> None:
    found = step_of(entry("zerostep/gather gradients bucket 2 wait", 1200, 1250))
    assert found.comm_spans == [CommSpan("gather gradients", "bucket 2", Interval(1200, 1250), spans((1200, 1250)))]


def test_the_drop_in_waits_in_its_gather() -> None:
    found = step_of(entry("zerostep/update", 1500, 1600), entry("zerostep/gather", 1600, 1700), op(1600, 1610))
    assert found.comm_spans == [CommSpan("gather", "gather", Interval(1600, 1700), spans((1610, 1700)))]
    assert found.updates == [Update([], Interval(1500, 1600))]
    assert found.host["update"] == spans((1500, 1600))


def test_what_another_thread_waits_for_holds_nobody_up() -> None:
    found = step_of(entry("zerostep/gather bucket 1", 1600, 1700, thread=LANE), op(1500, 1800))
    assert found.comm_spans == [CommSpan("gather", "bucket 1", Interval(1600, 1700), [])]
    assert found.exposed == {}


def test_meetings_are_waited_for_but_are_no_bucket() -> None:
    found = step_of(entry("zerostep/control", 1100, 1110), entry("zerostep/control wait", 1300, 1310))
    assert found.comm_spans == []
    assert found.exposed == {"control": spans((1300, 1310))}


def test_one_update_of_several_buckets() -> None:
    found = step_of(entry("zerostep/update bucket 3 to 5", 1300, 1400), entry("zerostep/update bucket 6", 1400, 1500))
    assert found.updates == [
        Update(["bucket 3", "bucket 4", "bucket 5"], Interval(1300, 1400)),
        Update(["bucket 6"], Interval(1400, 1500)),
    ]
    assert found.rows == ["bucket 3", "bucket 4", "bucket 5", "bucket 6"]


def test_a_collective_of_ddp_is_exposed_where_no_op_runs() -> None:
    found = step_of(
        entry("gloo:all_reduce", 1400, 1800, thread=LANE),
        entry("gloo:all_reduce", 1500, 1850, thread=LANE),
        op(1380, 1390, "c10d::allreduce_"),
        backward(1200, 1600),
        op(1650, 1660),  # so soon that the host was not idle
    )
    assert [(comm.row, comm.span) for comm in found.comm_spans] == [
        ("all-reduce 0", Interval(1400, 1800)),
        ("all-reduce 1", Interval(1500, 1850)),
    ]
    assert found.exposed_ms == pytest.approx(0.19)


def test_rows_of_collectives_begin_anew_with_each_step() -> None:
    early = entry("gloo:all_reduce", 500, 600, thread=LANE)
    found = step_of(early, op(1, 2), entry("gloo:all_reduce", 1400, 1800, thread=LANE))
    assert [comm.row for comm in found.comm_spans] == ["all-reduce 0"]


def test_own_messages_are_no_collectives() -> None:
    assert step_of(entry("gloo:send", 1100, 1200), entry("gloo:recv", 1100, 1200)).comm_spans == []


def test_messages_that_are_kernels_are_exposed_where_no_other_kernel_runs() -> None:
    found = step_of(
        entry("zerostep/reduce bucket 2", 1100, 1105),
        entry("zerostep/reduce bucket 2 wait", 1110, 1111),
        entry("zerostep/reduce bucket 2", 1200, 1400, "gpu_user_annotation", 20),
        entry("ncclDevKernel_ReduceScatter_Sum_f32", 1200, 1400, "kernel", 20),
        entry("ncclDevKernel_AllGather_RING", 1500, 1510, "kernel", 20),
        entry("gemm", 1250, 1350, "kernel", 21),
    )
    assert found.comm_spans == [
        CommSpan("reduce", "bucket 2", Interval(1200, 1400), spans((1200, 1250), (1350, 1400))),
        CommSpan("gather", "messages", Interval(1500, 1510), spans((1500, 1510))),
    ]
    assert found.device == spans((1250, 1350))
    assert found.exposed_ms == pytest.approx(0.11)


# ---------------------------------------------------------------------- the host


def test_the_host_does_one_thing_at_a_time() -> None:
    found = step_of(
        op(1100, 1200),
        op(1250, 1300),
        backward(1300, 1400),
        backward(1500, 1600),
        entry("Optimizer.step#ShardedOptimizer.step", 1700, 1950),
        op(1710, 1720),
        entry("zerostep/update bucket 0", 1800, 1900),
        op(1810, 1890),
    )
    assert found.host == {
        "forward": spans((1100, 1300)),
        "backward": spans((1300, 1600)),
        "step": spans((1700, 1800), (1900, 1950)),
        "update": spans((1800, 1900)),
    }


def test_updates_inside_backward_and_the_rest_of_the_pass() -> None:
    found = step_of(
        entry("zerostep/gather bucket 0 wait", 1050, 1060),  # in forward
        op(1100, 1200),
        backward(1300, 1500),
        entry("zerostep/update bucket 0", 1400, 1420),
        entry("Optimizer.step#AdamW.step", 1405, 1415),
        entry("zerostep/gather bucket 0", 1420, 1430),
        entry("zerostep/reduce bucket 1 wait", 1510, 1540),  # autograd's nodes have run, backward() has not returned
        op(1520, 1540),
        entry("zerostep/update bucket 1", 1540, 1550),
        entry("Optimizer.step#AdamW.step", 1541, 1549),
        entry("zerostep/gather bucket 1", 1550, 1560),
        entry("Optimizer.step#ShardedOptimizer.step", 1700, 1800),
        entry("zerostep/control wait", 1710, 1720),
    )
    assert found.host == {
        "forward": spans((1100, 1200)),
        "backward": spans((1300, 1400), (1420, 1540), (1550, 1560)),
        "step": spans((1700, 1800)),
        "update": spans((1400, 1420), (1540, 1550)),
    }
    assert found.updates == [Update([f"bucket {n}"], span) for n, span in enumerate(found.host["update"])]
    assert found.exposed == {
        "gather": spans((1050, 1060)),
        "reduce": spans((1510, 1520)),
        "control": spans((1710, 1720)),
    }


def test_two_passes_with_a_forward_between_them() -> None:
    found = step_of(backward(1100, 1200), op(1300, 1400), backward(1500, 1600))
    assert found.host["backward"] == spans((1100, 1200), (1500, 1600))
    assert found.host["forward"] == spans((1300, 1400))


def test_without_ranges_of_ours_the_step_is_the_update() -> None:
    found = step_of(entry("Optimizer.step#AdamW.step", 1700, 1950), op(1710, 1720))
    assert found.host["update"] == spans((1700, 1950))
    assert found.host["step"] == []


# ---------------------------------------------------------------------- steps


def test_steps_are_between_marks() -> None:
    assert trace(mark(4, 1000), mark(5, 2000), mark(7, 9000)).steps == {5: Interval(1000, 2000)}


def test_steps_of_the_profilers_own_schedule() -> None:
    assert trace(entry("ProfilerStep#3", 10, 20), entry("Optimizer.step#SGD.step", 15, 18)).steps == {
        3: Interval(10, 20)
    }


def test_steps_between_the_ends_of_the_first_optimizers_steps() -> None:
    found = trace(
        entry("Optimizer.step#ShardedOptimizer.step", 10, 20),
        entry("Optimizer.step#AdamW.step", 12, 14),
        entry("Optimizer.step#SGD.step", 25, 28),
        entry("Optimizer.step#ShardedOptimizer.step", 40, 50),
    )
    assert found.steps == {2: Interval(20, 50)}


def test_the_last_step_that_all_ranks_have() -> None:
    long, short = trace(mark(4, 0), mark(5, 10), mark(6, 20)), trace(mark(4, 0), mark(5, 10))
    assert common_step([long, short], None) == 5
    assert common_step([long], None) == 6
    assert common_step([long, short], 5) == 5
    with pytest.raises(TraceError, match=r"step 6 is not in the traces of all ranks: choose --step from 5"):
        common_step([long, short], 6)
    with pytest.raises(TraceError, match="no step is complete"):
        common_step([trace(op(0, 1))], None)


# ---------------------------------------------------------------------- files


def test_traces_are_ordered_by_the_rank_they_tell() -> None:
    raw = {"traceEvents": [], "distributedInfo": {"rank": 3}}
    assert [found.rank for found in sort_by_rank([parse(raw, 0), trace(rank=1)])] == [1, 3]
    with pytest.raises(TraceError, match="2 traces are of rank 3"):
        sort_by_rank([parse(raw, 0), parse(raw, 1)])


@pytest.mark.parametrize("content", ["", "[1, 2]", "{}", '{"traceEvents": [{"ph": "X", "dur": 1}]}'])
def test_a_file_that_is_no_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"trace\.json is not a trace of torch\.profiler"):
        read(path, 0)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(tmp_path / "trace.json", 0)


def test_one_trace_of_all_ranks_has_one_clock_and_a_process_each() -> None:
    arrow = {"ph": "s", "id": 5, "pid": 42, "tid": HOST, "ts": 1500, "cat": "fwdbwd", "name": "fwdbwd"}
    named = {"ph": "M", "name": "process_name", "ts": 0, "pid": 42, "tid": 0, "args": {"name": "python"}}
    launch, wait = entry("zerostep/reduce bucket 0", 1100, 1110), entry("zerostep/reduce bucket 0 wait", 1200, 1300)
    both = [mark(4, 1000), mark(5, 2000), op(1400, 1500), launch, wait, arrow, named]
    traces = [trace(*both, rank=0), trace(*both, rank=1, base=50_000)]
    events = merged(traces, [view_step(found, 5) for found in traces])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    ops = [event for event in events if event["name"] == "aten::mm"]
    assert ops[1]["ts"] - ops[0]["ts"] == 50  # microseconds between the bases
    assert ops[0]["pid"] != ops[1]["pid"]
    first, second = (event["id"] for event in events if event["ph"] == "s")
    assert first != second
    communications = [(event["ph"], event["ts"]) for event in events if event["name"] == "reduce bucket 0"]
    assert communications == [("b", 100), ("e", 300), ("b", 150), ("e", 350)]


# ---------------------------------------------------------------------- pictures


def test_a_picture_names_ranks_buckets_and_milliseconds(tmp_path: Path) -> None:
    found = step_of(
        op(1000, 1100),
        backward(1100, 1500),
        entry("zerostep/reduce bucket 0", 1300, 1310),
        entry("zerostep/reduce bucket 0 wait", 1500, 1600),
    )
    paths = [tmp_path / "step.svg", tmp_path / "step.png"]
    draw([found], 5, "train.py", paths)
    comments = [line for line in paths[0].read_text().splitlines() if line.strip().startswith("<!--")]
    text = "\n".join(comments)
    for label in (
        "train.py, step 5",
        "rank 0: 1.00 ms, exposed communication 0.10 ms (reduce 0.10)",
        "bucket 0",
        "host",
    ):
        assert label in text
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_names_that_no_picture_can_have(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"step\.txt is no picture: its name must end with \.svg, \.png, \.pdf"):
        check_paths([tmp_path / "step.txt"])
    with pytest.raises(TraceError, match="is not a folder"):
        check_paths([tmp_path / "nowhere" / "step.svg"])


# ---------------------------------------------------------------------- the profiler itself


class _Wrapper(torch.optim.Optimizer):
    """An optimizer with another one inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.inner.step()


def test_a_profile_of_a_real_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = _Wrapper(torch.optim.AdamW(model.parameters()))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().sum().backward()
            optimizer.step()
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    traced = read(tmp_path / "trace.json", 0)
    assert sorted(traced.steps) == [2, 3]
    seen = view_step(traced, 3)
    assert len(seen.host["backward"]) == 1
    assert seen.host["forward"][0].start < seen.host["backward"][0].start < seen.host["update"][0].start
    assert seen.exposed_ms == 0


def test_a_step_inside_backward_is_counted_once(tmp_path: Path) -> None:
    """By the next forward pass; but where the script calls some step() as well, by that."""
    counter = StepCounter(9, tmp_path / "rank0.json")
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for expected in (1, 2):
        counter._in_backward = True
        counter.before_forward(torch.nn.Identity(), ())
        with torch.no_grad():
            counter.before_forward(ddp, ())
        assert counter.steps == expected - 1
        counter.before_forward(ddp, ())
        counter.before_forward(ddp, ())
        assert counter.steps == expected
    counter._in_backward = True
    counter.before(optimizer)
    counter.after(optimizer)
    counter.before_forward(ddp, ())
    counter.end_of_script()
    assert counter.steps == 3


def test_updates_inside_backward_are_counted_by_the_calls_of_step(tmp_path: Path) -> None:
    counter = StepCounter(9, tmp_path / "rank0.json")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for expected in (1, 2, 3):
        with stepping_in_backward():
            inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
            counter.before(inner)
            counter.after(inner)
        counter.before(optimizer)
        counter.after(optimizer)
        assert counter.steps == expected
    counter.end_of_script()
    assert counter.steps == 3


def test_the_counter_counts_outer_steps_and_writes_the_wanted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerostep.tools.tracing.worker._hold", lambda: None)
    counter = StepCounter(3, tmp_path / "rank0.json")
    handles = [
        register_optimizer_step_pre_hook(counter.before),
        register_optimizer_step_post_hook(counter.after),
    ]
    try:
        model = torch.nn.Linear(4, 4)
        optimizer = _Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            other.step()
    finally:
        for handle in handles:
            handle.remove()
    assert counter.steps == 3
    assert list(read(tmp_path / "rank0.json", 0).steps) == [3]
    assert "traceEvents" in json.loads((tmp_path / "rank0.json").read_text())
