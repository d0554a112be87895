"""`ShardedOptimizer` inside the dp dimension of a mesh, with DTensor parameters, against plain torch.optim on them."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import SGD, AdamW, Muon

from tests.helpers.mesh_contest import (
    ADAMW,
    MOMENTUM,
    STEPS,
    Styles,
    assert_equal,
    contest,
    plain_optimizer,
    sharded,
    train,
)
from tests.helpers.meshes import (
    Net,
    Place,
    average,
    batches,
    build,
    global_norm,
    local_of,
    loss_of,
    place,
    sequence_parallel,
    tensor_parallel,
    train_plain,
    whole,
)
from tests.helpers.overlap import logged_warnings
from tests.helpers.pool import Pool, run_fresh
from zerostep import ShardedOptimizer

MESHES = [(2, 2), (1, 2), (2, 1), (4, 1), (1, 4)]

MODES: dict[str, dict[str, Any]] = {
    "step": {},
    "forward": {"gather": "forward"},
    "backward": {"update": "backward"},
    "backward, forward": {"update": "backward", "gather": "forward"},
    "all": {"reduction": "all"},
    "parameters": {"partition": "parameters"},
}


def _contests(group: ProcessGroup, shape: tuple[int, int], kinds: list[tuple[Any, Styles]], mode: str) -> None:
    here = place(*shape)
    for kind, styles in kinds:
        # With four replicas the terms of a sum come in another order.
        contest(here, kind, styles, MODES[mode], 1e-6 if shape[0] > 2 else 0.0)


PAIRS: list[tuple[Any, Styles]] = [(AdamW, sequence_parallel), ("muon", tensor_parallel)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_equal_to_torch_on_the_same_dtensors(pool: Pool, shape: tuple[int, int]) -> None:
    others = (AdamW, tensor_parallel), (SGD, sequence_parallel), ("muon", sequence_parallel)
    pool.run(_contests, 4, shape, [*PAIRS, *others], "forward")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_equal(pool: Pool, mode: str) -> None:
    pool.run(_contests, 4, (2, 2), PAIRS, mode)


class _Uneven(nn.Module):
    """Rows that four ranks cannot divide evenly: some have one more, one has none."""

    def __init__(self, here: Place) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.rows = self._param(here, torch.randn(5, 3, generator=generator), 0)
        self.columns = self._param(here, torch.randn(2, 7, generator=generator), 1)
        self.both = nn.Parameter(torch.randn(4, generator=generator))

    def _param(self, here: Place, value: Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(value, here.tp, [Shard(dim)]))

    def forward(self, x: Tensor) -> Tensor:
        total = whole((self.rows * self.rows).sum()) + whole((self.columns * 3.0).sin().sum())
        return total * x.mean() + (self.both * x.mean()).sum()


def _unevenly(group: ProcessGroup, shape: tuple[int, int], kind: Any) -> None:
    here = place(*shape)
    model, plain = _Uneven(here), _Uneven(here)
    options = ADAMW if kind is AdamW else MOMENTUM
    optimizer, theirs = sharded(kind, model, here), kind(plain.parameters(), **options)
    norms: list[list[float]] = [[], []]
    for x, _ in batches(here, STEPS):
        optimizer.zero_grad()
        model(x).backward()
        norms[0].append(float(optimizer.grad_norm()))
        optimizer.step()
        theirs.zero_grad()
        plain(x).backward()
        average(here, list(plain.parameters()))
        norms[1].append(float(global_norm(list(plain.parameters()))))
        theirs.step()
    assert_equal(model, plain)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("kind", [AdamW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_a_mesh_that_divides_unevenly(pool: Pool, shape: tuple[int, int], kind: Any) -> None:
    pool.run(_unevenly, 4, shape, kind)


# ---------------------------------------------------------------------- numbers of all gradients


def _clipped(group: ProcessGroup, shape: tuple[int, int]) -> None:
    here = place(*shape)
    for mode, styles in (("forward", sequence_parallel), ("all", tensor_parallel)):
        contest(here, AdamW, styles, MODES[mode], 1e-5, most=0.05)  # the factor is rounded once more or less


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_the_norm_counts_each_element_of_the_mesh_once(pool: Pool, shape: tuple[int, int]) -> None:
    pool.run(_clipped, 4, shape)


def _orders(group: ProcessGroup) -> None:
    here = place(2, 2)
    model, plain = build(here), build(here)
    optimizer = sharded(SGD, model, here)
    batch = batches(here, 1)[0]
    loss_of(model, batch).backward()
    loss_of(plain, batch).backward()
    average(here, list(plain.parameters()))
    grads = [whole(param.grad).flatten() for param in plain.parameters()]
    for order in (1.0, 2.0, 3.0, float("inf"), -float("inf"), 0.0):
        norms = torch.stack([torch.linalg.vector_norm(grad, order) for grad in grads])
        expected = float(torch.linalg.vector_norm(norms, order))
        assert float(optimizer.grad_norm(order)) == pytest.approx(expected, rel=1e-5), order
    # torch's own function sees stand-ins, which are of one kind, whatever the parameters are.
    total = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert float(total) == pytest.approx(float(global_norm(list(plain.parameters()))), rel=1e-6)


def test_norms_of_every_order(pool: Pool) -> None:
    pool.run(_orders, 4)


def _multiply(factor: float, part: Tensor) -> None:
    part.mul_(factor)


def _scaled(group: ProcessGroup, styles: Styles) -> None:
    here = place(2, 2)
    model, plain = build(here, styles), build(here, styles)
    optimizer = sharded(AdamW, model, here)
    before = [local_of(param).clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (x, y) in enumerate(batches(here, STEPS)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, (x, y))).backward()
        if step == 0:
            # On one rank alone, in parameters that the mesh divides: nobody may step.
            grads: list[Any] = [model.up.weight.grad, model.down.weight.grad]
            here_too = here.replica == 1 and here.tp.get_local_rank() == 1
            factor = float("inf") if here_too else 1.0
            grads[0].ops().edit([grad.param for grad in grads], partial(_multiply, factor))
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            same = [torch.equal(local_of(param), old) for param, old in zip(model.parameters(), before, strict=True)]
            assert all(same), "a rank has stepped though another has found an infinite gradient"
            assert scaler.get_scale() == 512.0
    theirs = plain_optimizer(AdamW, plain)
    train_plain(here, plain, theirs, batches(here, STEPS)[1:])
    optimizer.synchronize()
    assert_equal(model, plain, 1e-6)


@pytest.mark.parametrize("styles", [tensor_parallel, sequence_parallel], ids=["tp", "sp"])
def test_an_infinite_gradient_anywhere_in_the_mesh_skips_the_step(pool: Pool, styles: Styles) -> None:
    pool.run(_scaled, 4, styles)


# ---------------------------------------------------------------------- several passes, masters, late parameters


def _accumulated(group: ProcessGroup, how: str, styles: Styles) -> None:
    here = place(2, 2)
    model, plain = build(here, styles), build(here, styles)
    optimizer, theirs = sharded(AdamW, model, here, gather="forward"), plain_optimizer(AdamW, plain)
    data = batches(here, 8)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        if how == "no_sync":
            with optimizer.no_sync():
                loss_of(model, first).backward()
        else:
            loss_of(model, first).backward()
        loss_of(model, second).backward()
        optimizer.step()
        theirs.zero_grad()
        loss_of(plain, first).backward()
        loss_of(plain, second).backward()
        average(here, list(plain.parameters()))
        theirs.step()
    optimizer.synchronize()
    # Without no_sync() each pass is averaged by itself.
    assert_equal(model, plain, 0.0 if how == "no_sync" and styles is tensor_parallel else 1e-6)


@pytest.mark.parametrize("styles", [tensor_parallel, sequence_parallel], ids=["tp", "sp"])
@pytest.mark.parametrize("how", ["no_sync", "two passes"])
def test_gradients_of_several_passes_add_up(pool: Pool, how: str, styles: Styles) -> None:
    pool.run(_accumulated, 4, how, styles)


def _with_masters(group: ProcessGroup, kind: Any) -> None:
    here = place(2, 2)
    model, plain = build(here).bfloat16(), build(here).bfloat16()
    masters = build(here)
    for low, high in zip(plain.parameters(), masters.parameters(), strict=True):
        local_of(high).copy_(local_of(low))
    optimizer = sharded(kind, model, here, master_dtype=torch.float32, reduce_dtype=torch.float32)
    theirs = plain_optimizer(kind, masters)
    for x, y in batches(here, STEPS):
        optimizer.zero_grad()
        loss_of(model, (x.bfloat16(), y.bfloat16())).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(plain, (x.bfloat16(), y.bfloat16())).backward()
        for low, high in zip(plain.parameters(), masters.parameters(), strict=True):
            assert low.grad is not None
            high.grad = low.grad.float()
        average(here, list(masters.parameters()))
        theirs.step()
        for low, high in zip(plain.parameters(), masters.parameters(), strict=True):
            local_of(low).copy_(local_of(high))
    assert_equal(model, plain)


@pytest.mark.parametrize("kind", [AdamW, "muon"], ids=["adamw", "muon"])
def test_masters_of_dtensors(pool: Pool, kind: Any) -> None:
    pool.run(_with_masters, 4, kind)


def _late(group: ProcessGroup, read: str) -> None:
    here = place(2, 2)
    model, plain = build(here), build(here)
    data = batches(here, 2)
    train_plain(here, plain, plain_optimizer(AdamW, plain), data)
    optimizer = sharded(AdamW, model, here, gather="forward", bucket_mb=0.0005)
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert type(model.up.weight) is not DTensor, "nothing is in flight, so nothing is shown"
    param: Any = model.up.weight
    if read == "local":
        with torch.no_grad():
            found = param.to_local()
    else:
        found = param._local_tensor if read == "slot" else param.full_tensor()
    expected: Any = plain.up.weight
    expected = expected.full_tensor() if read == "full" else expected.to_local()
    assert torch.equal(found, expected)
    optimizer.synchronize()
    assert_equal(model, plain)


@pytest.mark.parametrize("read", ["local", "slot", "full"])
def test_whoever_reads_a_late_dtensor_waits(pool: Pool, read: str) -> None:
    pool.run(_late, 4, read)


# ---------------------------------------------------------------------- refusals


def _refused(group: ProcessGroup) -> None:
    here = place(2, 2)
    model = build(here)
    with pytest.raises(ValueError, match="among which this optimizer divides its state, too"):
        ShardedOptimizer(model, AdamW, process_group=here.tp)
    with pytest.raises(ValueError, match="among which this optimizer divides its state, too"):
        ShardedOptimizer(model, AdamW)
    with pytest.raises(ValueError, match="is a DTensor, which verify cannot be used with"):
        ShardedOptimizer(model, AdamW, process_group=here.dp, verify=True)
    sums = nn.Module()
    sums.sum = nn.Parameter(DTensor.from_local(torch.ones(3), here.tp, [Partial()], run_check=False))
    with pytest.raises(ValueError, match="is a partial sum over its mesh"):
        ShardedOptimizer(sums, AdamW, process_group=here.dp)
    optimizer = ShardedOptimizer(model, AdamW, process_group=here.dp)
    assert optimizer.stats().world_size == 2


def test_what_cannot_be_divided_is_refused(pool: Pool) -> None:
    pool.run(_refused, 4)


def _unequal(group: ProcessGroup) -> list[str]:
    here = place(2, 2)
    torch.manual_seed(dist.get_rank())
    model = Net()
    parallelize_module(model, here.tp, tensor_parallel())
    with logged_warnings() as logs:
        ShardedOptimizer(model, AdamW, process_group=here.dp)
    return logs


def test_replicas_that_are_not_equal_over_the_mesh_are_told(pool: Pool) -> None:
    """An ordinary parameter of another seed on each tp coordinate: torch says nothing, and the model is no model."""
    for rank, logs in enumerate(pool.run(_unequal, 4)):
        told = [text for text in logs if "over the tp dimension" in text]
        assert len(told) == (rank % 2 == 0), logs


def _one_rank_fails(group: ProcessGroup) -> None:
    """A rank that fails in the constructor: ranks with other blocks of the parameters fail with it."""
    here = place(2, 2)
    model = build(here)
    wrong = here.replica == 0 and here.tp.get_local_rank() == 0
    with pytest.raises(ValueError, match="learning rate"):
        ShardedOptimizer(model, AdamW, process_group=here.dp, lr=-1.0 if wrong else 1.0)
    train(model, sharded(AdamW, model, here), batches(here, 1))


def test_an_error_of_one_rank_reaches_the_whole_mesh(pool: Pool) -> None:
    pool.run(_one_rank_fails, 4)


class _Crossed(nn.Module):
    """Blocks of unequal sizes, so that ranks of a mesh have buckets of their own, and gradients that are partial sums.

    Partial sums are added up over the mesh in the order in which gradients arrive: that is the same on all its ranks,
    whatever their buckets are.
    """

    def __init__(self, here: Place) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        for index in range(4):
            rows, scale = torch.randn(5, 3, generator=generator), torch.randn(3, generator=generator)
            self.register_parameter(f"rows{index}", nn.Parameter(distribute_tensor(rows, here.tp, [Shard(0)])))
            self.register_parameter(f"scale{index}", nn.Parameter(distribute_tensor(scale, here.tp, [Replicate()])))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.mean()
        for index in range(4):
            rows, scale = getattr(self, f"rows{index}"), getattr(self, f"scale{index}")
            hidden = torch.tanh(whole((rows * scale).sum()) * hidden)
        return hidden


def _crossed(group: ProcessGroup, shape: tuple[int, int], bucket_mb: float) -> None:
    here = place(*shape)
    model, plain = _Crossed(here), _Crossed(here)
    optimizer, theirs = sharded(SGD, model, here, bucket_mb=bucket_mb), plain_optimizer(SGD, plain)
    for x, _ in batches(here, STEPS):
        for net, each in ((model, optimizer), (plain, theirs)):
            each.zero_grad()
            net(x).backward()
            if net is plain:
                average(here, list(plain.parameters()))
            each.step()
    assert_equal(model, plain)


@pytest.mark.parametrize("bucket_mb", [1e-5, 5e-5, 1.0])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
def test_partial_sums_add_up_in_one_order_whatever_the_buckets(
    pool: Pool, shape: tuple[int, int], bucket_mb: float
) -> None:
    pool.run(_crossed, 4, shape, bucket_mb)


def _wrong_gradient(group: ProcessGroup) -> None:
    here = place(2, 2)
    model = build(here)
    optimizer = sharded(SGD, model, here)
    model.up.weight.grad = torch.ones(model.up.weight.shape)
    with pytest.raises(TypeError, match=r"set \.grad to a DTensor on the same mesh"):
        optimizer.step()


def test_an_ordinary_gradient_of_a_dtensor_is_refused(pool: Pool) -> None:
    pool.run(_wrong_gradient, 4)


def _compiled(group: ProcessGroup) -> list[str]:
    here = place(2, 2)
    model, plain = (build(here, sequence_parallel) for _ in range(2))
    for param in [*model.parameters(), *plain.parameters()]:
        param.requires_grad_(param.dim() == 2)
    matrices = [param for param in plain.parameters() if param.requires_grad]
    train_plain(here, plain, Muon(matrices, lr=0.02), batches(here, STEPS))
    chosen = [each for each in model.named_parameters() if each[1].requires_grad]
    with logged_warnings() as logs:
        optimizer = ShardedOptimizer(model, Muon, chosen, process_group=here.dp, compile=True, lr=0.02)
        train(model, optimizer, batches(here, STEPS))
    assert_equal(model, plain)
    return logs


def test_what_a_mesh_divides_is_not_compiled(pool: Pool) -> None:
    """Compiled as what each rank holds, a slice would be made orthogonal."""
    for logs in pool.run(_compiled, 4):
        assert [text for text in logs if "updates parameters that a mesh divides by its own step()" in text], logs


def _eight(group: ProcessGroup) -> None:
    here = place(4, 2)
    for kind, styles, mode in ((AdamW, sequence_parallel, "forward"), ("muon", tensor_parallel, "backward")):
        contest(here, kind, styles, MODES[mode], 1e-5 if kind == "muon" else 1e-6)
    contest(here, SGD, sequence_parallel, MODES["step"], 1e-5, most=0.05)


def test_eight_ranks() -> None:
    """Four replicas of two: the terms of a sum come in another order, which Muon, in bfloat16, shows more."""
    outcomes = run_fresh(_eight, 8, deadline=120.0)
    assert [outcome.error for outcome in outcomes] == [None] * 8
