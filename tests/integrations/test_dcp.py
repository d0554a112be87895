"""`dcp_state` with torch.distributed.checkpoint: every world size into every other, and what is refused."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import SGD, AdamW, Optimizer

import zerostep
from tests.helpers.checkpoint_setups import SETUPS, WAYS, Odd, Pair, Setup, whole
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, batches, train
from tests.helpers.sharding import in_ddp, values
from zerostep import CheckpointError, ShardedOptimizer, ZeroRedundancyOptimizer
from zerostep.optim.view import view_of

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _save(path: str, optimizer: Any, group: ProcessGroup) -> None:
    with _quiet():
        dcp_save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path, process_group=group)


def _load(path: str, optimizer: Any, group: ProcessGroup, **options: Any) -> None:
    with _quiet():
        dcp_load({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path, process_group=group, **options)


def _memory(optimizer: Any) -> list[tuple[int, dict[str, Any]]]:
    """A copy of all state on this rank, with the parameters' numbers, and of the options."""
    states = [(each.param, {**each.per_element, **each.shared}) for each in view_of(optimizer).parts[0].param_states()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy([*states, (-1, {str(n): group for n, group in enumerate(groups)})])


def _assert_untouched(optimizer: Any, before: list[tuple[int, dict[str, Any]]]) -> None:
    now = _memory(optimizer)
    assert [number for number, _ in now] == [number for number, _ in before]
    for (number, ours), (_, theirs) in zip(now, before, strict=True):
        assert_same_state_dict({str(number): ours}, {str(number): theirs})


# Every world into every other.

PAIRS = {
    "adamw": [
        ("auto", "auto"),
        ("elements", "view"),
        ("zero", "elements"),
        ("hook", "parameters"),
        ("forward", "hook"),
    ],
    "momentum": [("auto", "zero"), ("zero", "auto")],
    "adafactor": [("auto", "zero"), ("zero", "auto")],
    "muon and adamw": [("auto", "auto")],
}


def _save_all(group: ProcessGroup, root: str) -> None:
    for name, pairs in PAIRS.items():
        for saver, _ in pairs:
            pair = SETUPS[name].make(group, saver)
            SETUPS[name].train(pair, group)
            before = _memory(pair[1])
            path = Path(root, f"{name}-{saver}-{dist.get_world_size(group)}")
            _save(str(path), pair[1], group)
            _assert_untouched(pair[1], before)
            state = whole(pair[1])
            if dist.get_rank(group) == 0:
                assert state["state"]
                torch.save(state, path.with_suffix(".expected"))


def _load_all(group: ProcessGroup, root: str, worlds: list[int]) -> int:
    count = 0
    for name, pairs in PAIRS.items():
        for saver, loader in pairs:
            pair = SETUPS[name].make(group, loader, seed=1)
            for world in worlds:  # the first time it has no state yet
                path = Path(root, f"{name}-{saver}-{world}")
                _load(str(path), pair[1], group)
                assert view_of(pair[1]).step == 2
                now = whole(pair[1])
                if dist.get_rank(group) == 0:
                    assert_same_state_dict(now, torch.load(path.with_suffix(".expected"), weights_only=True))
                count += 1
    return count


def test_every_world_loads_into_every_other(pool: Pool, tmp_path: Path) -> None:
    worlds = [1, 2, 3]
    for world in worlds:
        pool.run(_save_all, world, str(tmp_path))
    for world in worlds:
        counts = pool.run(_load_all, world, str(tmp_path), [each for each in worlds if each != world or world == 2])
        assert set(counts) == {sum(map(len, PAIRS.values())) * (3 if world == 2 else 2)}


def _goes_on(group: ProcessGroup, path: str, saver: str, loader: str) -> None:
    """Training after a load is what it would have been."""
    setup, series = SETUPS["adamw"], batches(3, dist.get_rank(group), 5)
    pair, again = setup.make(group, saver), setup.make(group, loader, seed=1)
    train(*pair, series[:3])
    with _quiet():
        module = pair[0].module if hasattr(pair[0], "module") else pair[0]
        dcp_save({"optim": zerostep.dcp_state(pair[1]), "model": module}, checkpoint_id=path, process_group=group)
        other = again[0].module if hasattr(again[0], "module") else again[0]
        dcp_load({"optim": zerostep.dcp_state(again[1]), "model": other}, checkpoint_id=path, process_group=group)
    train(*pair, series[3:])
    train(*again, series[3:])
    if loader == "forward":
        pair[1].synchronize()
        again[1].synchronize()
    assert_same_bits(values(again[0]), values(pair[0]))


@pytest.mark.parametrize("way", ["elements", "zero", "hook", "interleaved", "forward"])
def test_training_goes_on_after_a_load(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(_goes_on, 2, str(tmp_path / "it"), way, way)


# Odd parameters and odd optimizers.


def _odd_pair(group: ProcessGroup, way: str, seed: int, named: bool) -> Pair:
    model = Odd(seed)
    params: Any = list(model.named_parameters()) if named else list(model.parameters())
    if way == "zero":
        ddp = in_ddp(group, model, find_unused_parameters=True)
        return ddp, ZeroRedundancyOptimizer(params, AdamW, process_group=group, **ADAMW)
    return WAYS[way](group, model, params, AdamW, **ADAMW)


def _odd(group: ProcessGroup, path: str, way: str, save: bool, named: bool) -> None:
    module, optimizer = _odd_pair(group, way, 0 if save else 1, named)
    if save:
        for step in range(2):
            optimizer.zero_grad()
            module(torch.tensor([1.0, 0.5, -0.25]) * (1 + dist.get_rank(group) + step)).backward()
            optimizer.step()
        _save(path, optimizer, group)
    else:
        _load(path, optimizer, group)
    now = whole(optimizer)
    if dist.get_rank(group) == 0 and save:
        torch.save(now, f"{path}.expected")
    elif dist.get_rank(group) == 0:
        assert_same_state_dict(now, torch.load(f"{path}.expected", weights_only=True))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("saver", "loader"), [("elements", "zero"), ("zero", "auto"), ("parameters", "elements")])
def test_odd_parameters_come_back(pool: Pool, tmp_path: Path, saver: str, loader: str, named: bool) -> None:
    """Without dimensions or elements, frozen, unused, channels last, complex, of every dtype."""
    for world, other in ((4, 3), (1, 2)):
        path = str(tmp_path / f"{world}-{other}")
        pool.run(_odd, world, path, saver, True, named)
        pool.run(_odd, other, path, loader, False, named)


class Late(Optimizer):
    """Keeps plain values beside tensors, needs real numbers, and has state that no first step tells of."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Some descent."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["history"] = [*state.get("history", []), float(param.grad.abs().sum() >= 0)]
                state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.5 + param.grad
                if state["count"] == 3:
                    state["late"] = param.clone()
                param -= group["lr"] * state["mean"]


def _late(group: ProcessGroup, path: str, way: str, steps: int, before: int) -> str:
    """Save after some steps, load into another that has taken a few; what it says if it cannot."""
    setup = Setup(Late, {"lr": 0.1})
    pair, again = setup.make(group, way), setup.make(group, way, seed=1)
    setup.train(pair, group, steps)
    _save(path, pair[1], group)
    setup.train(again, group, before)
    untouched = _memory(again[1])
    try:
        _load(path, again[1], group)
    except CheckpointError as error:
        _assert_untouched(again[1], untouched)
        return str(error)
    assert_same_state_dict(whole(again[1]), whole(pair[1]))
    return ""


@pytest.mark.parametrize("way", ["parameters", "zero"])
def test_an_optimizer_that_nobody_knows(pool: Pool, tmp_path: Path, way: str) -> None:
    assert pool.run(_late, 2, str(tmp_path / "2"), way, 2, 0) == [""] * 2
    assert pool.run(_late, 2, str(tmp_path / "3"), way, 3, 3) == [""] * 2
    for text in pool.run(_late, 2, str(tmp_path / "3"), way, 3, 0):
        assert "'late'" in text and "take one step before you load" in text


def _masters(group: ProcessGroup, path: str, before: bool, after: bool) -> None:
    def make(seed: int, masters: bool) -> Pair:
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(torch.bfloat16)
        master = torch.float32 if masters else None
        return model, ShardedOptimizer(
            model, AdamW, process_group=group, master_dtype=master, bucket_mb=0.0001, lr=0.01
        )

    one, two = make(0, before), make(1, after)
    for step in range(3):
        one[1].zero_grad()
        one[0](torch.ones(2, 7, dtype=torch.bfloat16) * (step + 1)).float().square().sum().backward()
        one[1].step()
    _save(path, one[1], group)
    planner = DefaultLoadPlanner(allow_partial_load=after and not before)
    _load(path, two[1], group, planner=planner)
    state, again = whole(one[1])["state"], whole(two[1])["state"]
    for number, entry in again.items():
        for key, value in entry.items():
            if key == "master" and not before:
                continue  # made from the parameters that it has
            assert_same_bits({key: value}, {key: state[number][key].to(value.dtype)})
    assert dist.get_rank(group) or any("master" in entry for entry in again.values()) == after


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_masters(pool: Pool, tmp_path: Path, before: bool, after: bool) -> None:
    pool.run(_masters, 2, str(tmp_path / "it"), before, after)


def _proof(group: ProcessGroup, path: str) -> None:
    """The optimizer that runs beside ours in proof mode gets all state too, or it would protest at the next step."""
    setup, series = SETUPS["adamw"], batches(3, dist.get_rank(group), 4)
    pair, again = setup.make(group, "elements"), setup.make(group, "elements", verify=5)
    train(*pair, series[:2])
    _save(path, pair[1], group)
    with torch.no_grad():
        for ours, theirs in zip(again[0].parameters(), pair[0].parameters(), strict=True):
            ours.copy_(theirs)
    _load(path, again[1], group)
    train(*again, series[2:])


def test_proof_mode(pool: Pool, tmp_path: Path) -> None:
    pool.run(_proof, 3, str(tmp_path / "it"))


# Without state, broken, in the background, wrong.


def _empty(group: ProcessGroup, path: str, way: str) -> None:
    setup = SETUPS["adamw"]
    pair, again = setup.make(group, way), setup.make(group, "elements", seed=1)
    pair[1].param_groups[0]["lr"] = 0.125
    _save(path, pair[1], group)
    setup.train(again, group)
    _load(path, again[1], group)
    assert not whole(again[1])["state"] and again[1].param_groups[0]["lr"] == 0.125
    assert not view_of(again[1]).step


@pytest.mark.parametrize("way", ["elements", "zero"])
def test_an_optimizer_without_state(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(_empty, 2, str(tmp_path / "it"), way)


def _broken(group: ProcessGroup, path: str, way: str) -> list[str]:
    """A broken optimizer cannot be saved, but loading mends it."""
    setup = SETUPS["adamw"]
    pair = setup.make(group, way)
    setup.train(pair, group)
    _save(path, pair[1], group)
    pair[1]._health.mark_broken("step 3 failed")
    with pytest.raises(CheckpointException) as caught:
        _save(f"{path}-2", pair[1], group)
    _load(path, pair[1], group)
    setup.train(pair, group)
    return [str(error[0]) for error in caught.value.failures.values()]


@pytest.mark.parametrize("way", ["elements", "zero"])
def test_a_broken_optimizer(pool: Pool, tmp_path: Path, way: str) -> None:
    for texts in pool.run(_broken, 2, str(tmp_path / "it"), way):
        assert texts and all("step 3 failed" in text and "load the last checkpoint" in text for text in texts)


def _in_background(group: ProcessGroup, path: str, way: str) -> None:
    setup = SETUPS["adamw"]
    pair, again = setup.make(group, way), setup.make(group, way, seed=1)
    setup.train(pair, group)
    before = whole(pair[1])
    background = dist.new_group(dist.get_process_group_ranks(group))
    with _quiet():
        state = {"optim": zerostep.dcp_state(pair[1])}
        future = dcp_async_save(state, checkpoint_id=path, process_group=background)
        setup.train(pair, group)  # what is written is what was there
        future.result()  # type: ignore[union-attr]
    _load(path, again[1], group)
    assert_same_state_dict(whole(again[1]), before)


@pytest.mark.parametrize("way", ["elements", "zero"])
def test_async_save(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(_in_background, 2, str(tmp_path / "it"), way)


WRONG: dict[str, tuple[Setup, str]] = {
    "class": (Setup(SGD, {"lr": 0.1}), "AdamW.*now by SGD"),
    "names": (Setup(params=lambda model: list(model.parameters())), "Missing key.*param.0"),
    "options": (Setup(options={**ADAMW, "amsgrad": True}), "Missing key.*max_exp_avg_sq"),
    "groups": (
        Setup(params=lambda model: [{"params": [item]} for item in model.named_parameters()]),
        "build the same optimizer, with the same groups",
    ),
}


def _wrong(group: ProcessGroup, path: str, name: str) -> None:
    setup, (other, excerpt) = SETUPS["adamw"], WRONG[name]
    pair, again = setup.make(group, "elements"), other.make(group, "elements", seed=1)
    setup.train(pair, group)
    _save(path, pair[1], group)
    other.train(again, group, 1)
    before = _memory(again[1])
    with pytest.raises((CheckpointException, CheckpointError), match=f"(?s){excerpt}"):
        _load(path, again[1], group)
    _assert_untouched(again[1], before)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_on_every_rank(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(_wrong, 2, str(tmp_path / "it"), name)


def _in_another_order(group: ProcessGroup, path: str) -> None:
    """Elements are counted in memory order: another memory format needs another tool."""
    model, turned = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ours = [ShardedOptimizer(each, AdamW, process_group=group, lr=0.1) for each in (model, turned)]
    model(torch.ones(1, 2, 3, 3)).sum().backward()
    ours[0].step()
    _save(path, ours[0], group)
    with pytest.raises(CheckpointError, match="'weight' had order of dimensions in memory"):
        _load(path, ours[1], group)
    assert not whole(ours[1])["state"]


def test_another_memory_format_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_in_another_order, 2, str(tmp_path / "it"))


def test_only_our_optimizers() -> None:
    with pytest.raises(TypeError, match="SGD has no shards"):
        zerostep.dcp_state(SGD(nn.Linear(2, 2).parameters()))


# What DCP may not do by itself.

OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "on the host": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def _calls(model: nn.Module, optimizer: Any, given: Mapping[str, Any], path: str) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        "save": lambda: dcp_save({"optim": optimizer}, checkpoint_id=path),
        "load": lambda: dcp_load({"optim": optimizer}, checkpoint_id=path),
    }
    for name, options in OPTIONS.items():
        found |= {
            f"get, {name}": partial(get_optimizer_state_dict, model, optimizer, options=options),
            f"get both, {name}": partial(get_state_dict, model, optimizer, options=options),
            f"set, {name}": partial(set_optimizer_state_dict, model, optimizer, dict(given), options=options),
            f"set both, {name}": partial(
                set_state_dict,
                model,
                optimizer,
                model_state_dict={name: torch.zeros_like(value) for name, value in model.state_dict().items()},
                optim_state_dict=dict(given),
                options=options,
            ),
        }
    return found


def _by_itself(group: ProcessGroup, path: str, way: str, when: str) -> int:
    """Every call twice. A rank that owns nothing and a rank that has consolidated are as the others."""
    plain = nn.Linear(3, 1, bias=False)
    own = AdamW(plain.named_parameters())
    plain(torch.ones(2, 3)).sum().backward()
    own.step()
    given = get_optimizer_state_dict(plain, own)
    model, optimizer = (
        WAYS[way](group, copy.deepcopy(plain), None, AdamW) if way in SHARDED else _tiny(group, way, plain)
    )
    if when != "before":
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if when == "consolidated":
        optimizer.consolidate_state_dict(to=0)
    before, weights = _memory(optimizer), values(model)
    calls = _calls(model, optimizer, given, path)
    for name, call in [*calls.items(), *calls.items()]:
        with pytest.raises(RuntimeError, match=r"zerostep\.dcp_state\(optimizer\)"), _quiet():
            pytest.fail(f"{name} returned {call()}")
        _assert_untouched(optimizer, before)
        assert all(param.grad is None for param in model.parameters())
    assert_same_bits(values(model), weights)
    dist.barrier(group)  # nobody has left anything on the way
    assert not Path(path).exists()
    return len(calls)


SHARDED = ("elements", "parameters")


def _tiny(group: ProcessGroup, way: str, plain: nn.Module) -> Pair:
    model = copy.deepcopy(plain)
    return WAYS[way](group, model, list(model.named_parameters()), AdamW)


@pytest.mark.parametrize("when", ["before", "after", "consolidated"])
@pytest.mark.parametrize("way", ["elements", "parameters", "zero", "hook"])
def test_dcp_by_itself_is_refused_and_changes_nothing(pool: Pool, tmp_path: Path, way: str, when: str) -> None:
    world = 4  # more ranks than elements
    assert pool.run(_by_itself, world, str(tmp_path / "it"), way, when) == [2 + 4 * len(OPTIONS)] * world


def test_the_state_itself_is_as_before(pool: Pool) -> None:
    """Who is not DCP is not refused."""
    assert pool.run(_looks_at_state, 2) == [True] * 2


def _looks_at_state(group: ProcessGroup) -> bool:
    pair = SETUPS["adamw"].make(group, "elements")
    SETUPS["adamw"].train(pair, group)
    state: Mapping[Tensor, Any] = pair[1].state
    with pytest.raises(RuntimeError, match=r"not been consolidated.*to=\d\).*zerostep\.dcp_state"):
        pair[1].state_dict()
    return bool(state)
