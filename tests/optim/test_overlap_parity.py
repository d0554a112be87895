"""Overlap mode equals DDP with the plain optimizer, bit for bit and from the first backward pass.

One job trains several replicas of a model in lockstep: one with a plain optimizer and the wrapped hook alone, the
others with the optimizer inside backward. After every backward pass their parameters and gradients are compared, and at
the end the whole optimizer state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam, Optimizer

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import OPTIMIZERS, Batch, Case, assert_same_bits, assert_same_state_dict, batches, build
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

World = int | tuple[int, ...]
Hook = Callable[[Any, GradBucket], Future[Tensor]]

STEPS = 6  # DDP rebuilds its buckets in the second forward pass, with a static graph in the third
SMALL_BUCKETS = 0.0003
HOOKS = {"sequential": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
GRAPHS: dict[str, dict[str, bool]] = {
    "default": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}


class UserAdam(Adam):
    """An optimizer that torch does not know: Adam with a pull towards one, and with state and an option of its own."""

    def __init__(self, params: Any, lr: float = 0.01, pull: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("pull", pull)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["pulled"] = state.get("pulled", torch.zeros(())) + 1
                    param.lerp_(torch.ones_like(param), group["pull"] * group["lr"])
        return loss


class WithSpare(nn.Module):
    """A model with a layer that no forward pass uses, registered before the others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.spare = nn.Linear(5, 6)
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        """The inner model's prediction."""
        result: Tensor = self.inner(inputs)
        return result


class Mixed(nn.Module):
    """Layers of three dtypes, from nine numbers to three."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.first = nn.Linear(9, 8)
            self.second = nn.Linear(8, 7).double()
            self.third = nn.Linear(7, 6).bfloat16()
            self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Each layer in its own dtype."""
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs)).double()))
        result: Tensor = self.last(torch.tanh(self.third(hidden.bfloat16())).float())
        return result


@dataclass(frozen=True)
class Task:
    """A training run that all replicas of a job follow."""

    optimizer: str = "adamw"
    model: str = ""  # the optimizer's own, if not given
    graph: str = "default"
    ddp: dict[str, Any] = field(default_factory=dict)
    wrapped: str = "allreduce"
    groups: int = 0
    steps: int = STEPS
    late_static_graph: bool = False
    every: bool = False  # both values of shard_buckets for both hooks

    @property
    def case(self) -> Case:
        """The optimizer, its options and its model."""
        found = Case(UserAdam, {"lr": 0.02}) if self.optimizer == "user" else OPTIMIZERS[self.optimizer]
        return found._replace(model=self.model or found.model)

    def build(self) -> nn.Module:
        """A fresh model."""
        model = Mixed() if self.case.model == "mixed" else build(self.case.model)
        return model if self.graph == "default" else WithSpare(model)

    def batches(self, rank: int) -> list[Batch]:
        """The inputs of one rank."""
        return batches(3, rank, self.steps, "matrices" if self.case.model == "mixed" else self.case.model)


class Replica:
    """A model in DDP and an optimizer for it."""

    def __init__(self, group: ProcessGroup, task: Task) -> None:
        options = {"bucket_cap_mb": SMALL_BUCKETS} | GRAPHS[task.graph] | task.ddp
        self.ddp = DDP(task.build(), process_group=group, **options)
        if task.late_static_graph:
            self.ddp._set_static_graph()
        self.params = self._grouped(task) if task.groups else list(self.ddp.parameters())
        self.optimizer = self.make(group, task)

    def _grouped(self, task: Task) -> list[dict[str, Any]]:
        """Groups with options of their own, the first one without any."""
        params, lr = list(self.ddp.parameters()), task.case.options["lr"]
        own = [{}, {"lr": lr / 2, "weight_decay": 0.3}, {"lr": lr * 2, "maximize": True}]
        return [{"params": params[i :: task.groups], **own[i]} for i in range(task.groups)]

    def make(self, group: ProcessGroup, task: Task) -> Optimizer:
        """The plain optimizer, beside the wrapped hook alone."""
        state, wrapped = _wrapped(task.wrapped, group)
        # By another name: DDP refuses one of the hooks by its own where there is no accelerator, though it works.
        self.ddp.register_comm_hook(state, lambda state, bucket: wrapped(state, bucket))
        return task.case.optimizer(self.params)

    def train(self, batch: Batch) -> None:
        """One step of whatever kind; gradients stay."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        mse_loss(self.ddp(inputs), targets).backward()
        self.finish()

    def finish(self) -> None:
        """What comes after backward."""
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients there are, by name."""
        return {name: param.grad for name, param in self.ddp.named_parameters() if param.grad is not None}


class Overlapped(Replica):
    """A replica whose optimizer runs inside backward."""

    def __init__(self, group: ProcessGroup, task: Task, hook: str, shard_buckets: bool) -> None:
        self.name, self.shard_buckets = hook, shard_buckets
        self.buckets: list[int] = []
        super().__init__(group, task)

    def make(self, group: ProcessGroup, task: Task) -> Optimizer:
        """Ours, with a wrapped hook that takes note of the buckets."""
        case = task.case
        self.zero = ZeroRedundancyOptimizer(self.params, case.kind, group, overlap_with_ddp=True, **case.options)
        state, wrapped = _wrapped(task.wrapped, group)
        buckets = self.buckets  # and not this object: what a hook holds, its DDP module holds, where nobody can see it

        def counting(state: Any, bucket: GradBucket) -> Future[Tensor]:
            if bucket.index() == 0:
                buckets.append(0)
            buckets[-1] += 1
            return wrapped(state, bucket)

        hook = HOOKS[self.name](counting, self.ddp, self.zero, shard_buckets=self.shard_buckets)
        self.ddp.register_comm_hook(state, hook)
        return self.zero

    def finish(self) -> None:
        """Nothing: backward has done it all."""


def _new_tensor_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Averages, in memory of its own; DDP's bucket stays as it is."""
    found = bucket.buffer() / group.size()
    future: Future[Any] = dist.all_reduce(found, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _wrapped(name: str, group: ProcessGroup) -> tuple[Any, Hook]:
    """A DDP hook of which each replica has its own, with its state."""
    simple: Mapping[str, Hook] = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "fp16 around allreduce": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        "new tensor": _new_tensor_hook,
    }
    if name in simple:
        return group, simple[name]
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1
    )
    return state, powerSGD_hook.powerSGD_hook


def _replicas(group: ProcessGroup, task: Task) -> tuple[Replica, list[Overlapped]]:
    every = [(hook, shard) for hook in HOOKS for shard in (False, True)]
    return Replica(group, task), [Overlapped(group, task, *each) for each in (every if task.every else every[1:3])]


def _lockstep(group: ProcessGroup, task: Task) -> list[int]:
    """Train all replicas, compare them, and return the number of buckets of every backward pass."""
    plain, ours = _replicas(group, task)
    start = {name: param.detach().clone() for name, param in plain.ddp.named_parameters()}
    for batch in task.batches(dist.get_rank(group)):
        plain.train(batch)
        for replica in ours:
            replica.train(batch)
            assert_same_bits(replica.ddp.named_parameters(), plain.ddp.named_parameters())
            assert_same_bits(replica.gradients(), plain.gradients())
    _assert_same_states(plain, ours)
    _assert_trained(plain, start)
    for replica in ours:
        assert replica.buckets == ours[0].buckets
    return ours[0].buckets


def _assert_same_states(plain: Replica, ours: list[Overlapped]) -> None:
    for number, replica in enumerate(ours):
        zero = replica.zero
        to = number % zero.world_size
        zero.consolidate_state_dict(to=to)
        if to == zero.rank:
            assert_same_state_dict(zero.state_dict(), plain.optimizer.state_dict())


def _assert_trained(plain: Replica, start: Mapping[str, Tensor]) -> None:
    """The comparison means something: used parameters have moved, the spare ones have not."""
    for name, param in plain.ddp.named_parameters():
        assert torch.equal(param, start[name]) == ("spare" in name), name


def _all_lockstep(group: ProcessGroup, tasks: list[Task]) -> list[list[int]]:
    return [_lockstep(group, task) for task in tasks]


def _with_both_gradient_modes(task: Task) -> Iterator[Task]:
    for views in (False, True):
        yield Task(**(vars(task) | {"ddp": {**task.ddp, "gradient_as_bucket_view": views}}))


EXPECTED_BUCKETS = {  # of every backward pass: before and after DDP has rebuilt them
    "default": (1, 1),
    "static_graph": (1, 2),
    "find_unused": (None, 0),
}


def _across_the_rebuild() -> Iterator[tuple[str, str, int]]:
    """Every graph at every number of ranks, and with further classes at one of them, by turns."""
    for number, graph in enumerate(GRAPHS):
        yield from ((graph, "adamw", world) for world in (1, 2, 3))
        yield from (
            (graph, optimizer, 2 + (number + place) % 2) for place, optimizer in enumerate(("sgd_nesterov", "nadam"))
        )


@pytest.mark.parametrize(("graph", "optimizer", "world"), list(_across_the_rebuild()))
def test_statement_38_equals_plain_from_the_first_backward_across_the_rebuild(
    pool: Pool, graph: str, optimizer: str, world: int
) -> None:
    tasks = list(_with_both_gradient_modes(Task(optimizer, graph=graph, every=True)))
    buckets = pool.run(_all_lockstep, world, tasks)
    first, before = EXPECTED_BUCKETS[graph]
    for found in (found for rank in buckets for found in rank):
        assert len(found) == STEPS
        assert found[:before] == [first] * before
        assert min(found[before:]) >= 3 and len(set(found[before:])) == 1


@pytest.mark.parametrize("late", [False, True], ids=["constructor", "afterwards"])
def test_statement_36_static_graph_declared_in_the_constructor_or_afterwards(pool: Pool, late: bool) -> None:
    options = {} if late else {"static_graph": True}
    buckets = pool.run(_lockstep, 2, Task("adamw", ddp=options, late_static_graph=late))
    assert buckets[0][:2] == [1, 1] and min(buckets[0][2:]) >= 3


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adam_amsgrad"])
def test_statement_40_unused_parameters_may_be_looked_for(pool: Pool, optimizer: str, world: int) -> None:
    tasks = [
        Task(optimizer, ddp={"find_unused_parameters": True}),
        Task(optimizer, ddp={"find_unused_parameters": True, "static_graph": True}),
        Task(optimizer, graph="find_unused", ddp={"bucket_cap_mb": 1}),
    ]
    pool.run(_all_lockstep, world, tasks)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "user"])
def test_statement_43_every_optimizer_class(pool: Pool, optimizer: str) -> None:
    pool.run(_lockstep, 2, Task(optimizer))


@pytest.mark.parametrize("world", [3, OFFSET], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "user"])
def test_statement_43_whole_matrices_and_user_classes_in_other_worlds(pool: Pool, optimizer: str, world: World) -> None:
    pool.run(_lockstep, world, Task(optimizer))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("groups", [2, 3])
def test_statement_43_groups_with_their_own_options(pool: Pool, groups: int, world: int) -> None:
    pool.run(_all_lockstep, world, [Task("adamw", groups=groups), Task("sgd_nesterov", groups=groups)])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mixed_dtypes(pool: Pool, world: int) -> None:
    tasks = list(_with_both_gradient_modes(Task("adamw", model="mixed")))
    buckets = pool.run(_all_lockstep, world, [*tasks, Task("sgd_momentum", model="mixed", graph="find_unused")])
    assert buckets[0][0][0] == 3  # one for each dtype


@pytest.mark.parametrize("world", [2, 3])
def test_channels_last_convolutions(pool: Pool, world: int) -> None:
    pool.run(_all_lockstep, world, list(_with_both_gradient_modes(Task("adamw_convolutions"))))


@pytest.mark.parametrize("world", [2, 4, OFFSET], ids=str)
def test_statement_46_on_a_subgroup_and_on_four_ranks(pool: Pool, world: World) -> None:
    pool.run(_all_lockstep, world, [Task("adamw"), Task("sgd_nesterov", graph="find_unused")])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wrapped", ["allreduce", "fp16", "bf16", "fp16 around allreduce"])
def test_wrapped_hooks_that_reduce_in_place(pool: Pool, wrapped: str, world: int) -> None:
    pool.run(_all_lockstep, world, list(_with_both_gradient_modes(Task("adamw", wrapped=wrapped))))


@pytest.mark.parametrize("world", [2, 3])
def test_statement_45_a_wrapped_hook_that_returns_a_new_tensor(pool: Pool, world: int) -> None:
    pool.run(_all_lockstep, world, list(_with_both_gradient_modes(Task("adamw", wrapped="new tensor"))))
    pool.run(_lockstep, world, Task("adamw_convolutions", wrapped="new tensor"))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_wrapped_hook_with_state_of_its_own(pool: Pool, world: int) -> None:
    # One bucket: PowerSGD launches collectives in callbacks of others, which Gloo keeps in order for one bucket only.
    pool.run(_lockstep, world, Task("adamw", "matrices", wrapped="powersgd", ddp={"bucket_cap_mb": 1}, steps=8))
