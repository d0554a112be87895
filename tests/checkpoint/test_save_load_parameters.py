"""`save` and `load` of unusual parameters, buffers and fp32 masters."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import zerostep
from tests.helpers.checkpoint_setups import (
    ADAMW,
    SETUPS,
    WAYS,
    Odd,
    Pair,
    Setup,
    same_weights,
    sharded_pair,
    weights,
    whole,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, batches, build
from tests.helpers.sharding import in_ddp, values
from zerostep import ZeroRedundancyOptimizer

# Odd parameters.


def _odd_training(pair: Pair, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        pair[1].zero_grad()
        pair[0](torch.tensor([1.0, 0.5, -0.25]) * (1 + rank + step)).backward()
        pair[1].step()


CHOICES: dict[str, Callable[[nn.Module], Any]] = {
    "all": lambda model: list(model.named_parameters()),
    "positions": lambda model: list(model.parameters()),
    "trained": lambda model: [item for item in model.named_parameters() if item[1].requires_grad],
}


def _odd_pair(group: ProcessGroup, way: str, seed: int, params: str) -> Pair:
    model = Odd(seed)
    if way in ("elements", "parameters", "auto"):
        return WAYS[way](group, model, CHOICES[params](model), AdamW, **ADAMW)
    options = {"process_group": group, "parameters_as_bucket_view": way == "view", **ADAMW}
    zero = ZeroRedundancyOptimizer(CHOICES[params](model), AdamW, **options)
    return in_ddp(group, model, find_unused_parameters=True), zero


def _save_odd(group: ProcessGroup, path: str, way: str, params: str) -> None:
    pair = _odd_pair(group, way, 0, params)
    _odd_training(pair, dist.get_rank(group))
    state, kept = whole(pair[1]), weights(pair[0])
    zerostep.save(path, pair[1], pair[0])
    if dist.get_rank(group) == 0:
        torch.save([state, kept], f"{path}.expected")


def _load_odd(group: ProcessGroup, path: str, way: str, params: str) -> None:
    pair = _odd_pair(group, way, 1, params)
    zerostep.load(path, pair[1], pair[0])
    state, kept = torch.load(f"{path}.expected", weights_only=True)
    same_weights(weights(pair[0]), kept)
    model = pair[0].module if isinstance(pair[0], DDP) else pair[0]
    assert model.tied is model.conv and model.counts == [0]
    now = whole(pair[1])
    if dist.get_rank(group) == 0:
        assert_same_state_dict(now, state)
        names = [name for name, param in model.named_parameters() if params != "trained" or param.requires_grad]
        assert {"unused", "frozen", "empty"} >= {name for n, name in enumerate(names) if n not in now["state"]}
        assert names.index("unused") not in now["state"]


@pytest.mark.parametrize("params", ["all", "positions", "trained"])
@pytest.mark.parametrize(("saver", "loader"), [("elements", "zero"), ("view", "auto"), ("parameters", "elements")])
def test_odd_parameters_come_back(pool: Pool, tmp_path: Path, saver: str, loader: str, params: str) -> None:
    """Without dimensions, empty, frozen, unused, tied, channels last, complex, of every dtype; buffers, extra state."""
    for world, other in ((4, 3), (1, 4), (2, 1)):
        path = str(tmp_path / f"{world}-{other}")
        pool.run(_save_odd, world, path, saver, params)
        pool.run(_load_odd, other, path, loader, params)


def _orders(group: ProcessGroup, root: str) -> None:
    """The same model with its weights in one order in memory and in the other."""
    formats = (torch.channels_last, torch.contiguous_format)
    for number, (saver, loader, order) in enumerate(
        itertools.product(("elements", "zero"), ("elements", "view"), (0, 1))
    ):

        def made(seed: int, order: int) -> nn.Module:
            return build("convolutions", seed).to(memory_format=formats[order])  # type: ignore[call-overload]

        setup = Setup(build=partial(made, order=order), batches="convolutions")
        pair = setup.make(group, saver)
        setup.train(pair, group)
        zerostep.save(Path(root, str(number)), pair[1], pair[0])
        other = Setup(build=partial(made, order=1 - order), batches="convolutions").make(group, loader, seed=1)
        zerostep.load(Path(root, str(number)), other[1], other[0])
        same_weights(weights(other[0]), weights(pair[0]))
        assert_same_state_dict(whole(other[1]), whole(pair[1]))


def test_another_order_in_memory(pool: Pool, tmp_path: Path) -> None:
    pool.run(_orders, 2, str(tmp_path))


class TensorExtra(nn.Linear):
    """Its extra state is a tensor, made anew whenever somebody asks."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen = [0.0, 0.0]

    def get_extra_state(self) -> Tensor:
        """A tensor that is not the module's own."""
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Tensor) -> None:
        """Back again."""
        self.seen = state.tolist()


def _tensor_extra(group: ProcessGroup, path: str) -> None:
    model, other = TensorExtra(), TensorExtra()
    model.seen = [1.0, 2.0]
    zerostep.save(path, sharded_pair(group, model, None, AdamW)[1], model)
    zerostep.load(path, sharded_pair(group, other, None, AdamW)[1], other)
    assert other.seen == [1.0, 2.0]


def test_extra_state_that_is_a_tensor_is_set_and_not_written_into(pool: Pool, tmp_path: Path) -> None:
    pool.run(_tensor_extra, 2, str(tmp_path / "it"))


def _more_ranks_than_elements(group: ProcessGroup, root: str) -> None:
    """Three elements for four ranks, and back."""
    for number, (saver, loader) in enumerate(itertools.product(("elements", "zero"), ("elements", "view"))):
        pairs = []
        for way in (saver, loader):
            model = nn.Linear(2, 1)
            with torch.no_grad():
                model.weight.fill_(0.5)
            pairs.append(WAYS[way](group, model, list(model.named_parameters()), AdamW, **ADAMW))
        for _ in range(2):
            pairs[0][1].zero_grad()
            pairs[0][0](torch.ones(1, 2)).sum().backward()
            pairs[0][1].step()
        zerostep.save(Path(root, str(number)), *reversed(pairs[0]))
        zerostep.load(Path(root, str(number)), *reversed(pairs[1]))
        assert_same_state_dict(whole(pairs[1][1]), whole(pairs[0][1]))
        assert_same_bits(values(pairs[1][0]), values(pairs[0][0]))


def test_more_ranks_than_elements(pool: Pool, tmp_path: Path) -> None:
    pool.run(_more_ranks_than_elements, 4, str(tmp_path))


def _before_the_first_step(group: ProcessGroup, root: str) -> None:
    setup = SETUPS["adamw"]
    for saver, loader in (("auto", "zero"), ("zero", "auto")):
        path = Path(root, saver)
        fresh = setup.make(group, saver)
        zerostep.save(path, fresh[1], fresh[0])
        used = setup.make(group, loader, seed=1, lr=0.5)
        setup.train(used, group)
        assert zerostep.load(path, used[1], used[0]).step == 0
        assert whole(used[1])["state"] == {}
        assert used[1].param_groups[0]["lr"] == 0.01
        same_weights(weights(used[0]), weights(fresh[0]))
        setup.train(used, group)
        setup.train(fresh, group)
        assert_same_bits(values(used[0]), values(fresh[0]))


def test_a_checkpoint_from_before_the_first_step_takes_all_state_away(pool: Pool, tmp_path: Path) -> None:
    pool.run(_before_the_first_step, 2, str(tmp_path))


# Masters.


def _masters(group: ProcessGroup, root: str, kind: Any, options: dict[str, Any]) -> None:
    """A bfloat16 model with float32 masters: exactly back, into float32 and from it."""
    low: dict[str, Any] = {"master_dtype": torch.float32, "reduce_dtype": torch.float32}
    setup = Setup(kind, options, build=lambda seed: build("mlp", seed).bfloat16())
    full = Setup(kind, options)

    def trained(pair: Pair) -> Pair:
        for inputs, targets in batches(3, dist.get_rank(group), 3):
            pair[1].zero_grad()
            mse_loss(pair[0](inputs).float(), targets).backward()
            pair[1].step()
        return pair

    pair = trained(setup.make(group, "elements", **low))
    zerostep.save(Path(root, "low"), pair[1], pair[0])
    again = setup.make(group, "parameters", seed=1, **low)
    zerostep.load(Path(root, "low"), again[1], again[0])
    assert_same_state_dict(_with_masters(again[1]), _with_masters(pair[1]))
    same_weights(weights(again[0]), weights(pair[0]))
    trained(pair), trained(again)
    assert_same_state_dict(_with_masters(again[1]), _with_masters(pair[1]))

    # Into a float32 model: its weights are the masters, which the bfloat16 weights are too coarse for.
    zerostep.save(Path(root, "low again"), pair[1], pair[0])
    wide = full.make(group, "zero", seed=1)
    zerostep.load(Path(root, "low again"), wide[1], wide[0])
    masters = _masters_of(pair[1])
    if masters:
        assert_same_bits(dict(zip(masters, values(wide[0]).values(), strict=True)), masters)
        assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())

    # And from a float32 model: the masters are its weights.
    trained(wide)
    zerostep.save(Path(root, "full"), wide[1], wide[0])
    narrow = setup.make(group, "elements", seed=1, **low)
    zerostep.load(Path(root, "full"), narrow[1], narrow[0])
    masters = _masters_of(narrow[1])
    if masters:
        assert_same_bits(masters, dict(zip(masters, values(wide[0]).values(), strict=True)))
    for name, value in values(narrow[0]).items():
        assert torch.equal(value, values(wide[0])[name].bfloat16())


def _masters_of_nobody(group: ProcessGroup, root: str) -> None:
    """Saved without masters, in bfloat16: they are made of the weights that were loaded, not of those before."""
    setup = Setup(build=lambda seed: build("mlp", seed).bfloat16())
    pair = setup.make(group, "elements")
    zerostep.save(Path(root, "it"), pair[1], pair[0])
    again = setup.make(group, "elements", seed=1, master_dtype=torch.float32)
    zerostep.load(Path(root, "it"), again[1], again[0])
    masters = _masters_of(again[1])
    if masters:
        assert_same_bits(masters, {str(i): value.float() for i, value in enumerate(values(pair[0]).values())})


def test_masters_that_nobody_saved_are_the_loaded_weights(pool: Pool, tmp_path: Path) -> None:
    pool.run(_masters_of_nobody, 2, str(tmp_path))


def _with_masters(optimizer: Any) -> dict[str, Any]:
    found = whole(optimizer)
    assert optimizer.rank or all("master" in entry for entry in found["state"].values())
    return found


def _masters_of(optimizer: Any) -> dict[str, Tensor]:
    return {str(number): entry["master"] for number, entry in _with_masters(optimizer)["state"].items()}


@pytest.mark.parametrize(("kind", "options"), [(AdamW, ADAMW), (SGD, {"lr": 0.05, "momentum": 0.9})])
def test_masters_come_back_exactly(pool: Pool, tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    pool.run(_masters, 2, str(tmp_path), kind, options)


def _masters_without_state(group: ProcessGroup, root: str) -> None:
    """Plain gradient descent keeps nothing but the masters."""
    low: dict[str, Any] = {"master_dtype": torch.float32, "reduce_dtype": torch.float32}
    setup = Setup(SGD, {"lr": 1e-4}, build=lambda seed: build("mlp", seed).bfloat16())
    runs = []
    for resumed in (False, True):
        pair = setup.make(group, "elements", **low)
        for step, (inputs, targets) in enumerate(batches(3, dist.get_rank(group), 40)):
            if resumed and step == 20:
                zerostep.save(Path(root, "it"), pair[1], pair[0])
                pair = setup.make(group, "elements", seed=1, **low)
                zerostep.load(Path(root, "it"), pair[1], pair[0])
            pair[1].zero_grad()
            mse_loss(pair[0](inputs).float(), targets).backward()
            pair[1].step()
        shards = pair[1]._training.engine.buckets.shards.values()
        runs.append({str(i): shard.master.clone() for i, shard in enumerate(shards)})
    assert_same_bits(*runs)


def test_masters_of_an_optimizer_without_state_come_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(_masters_without_state, 2, str(tmp_path))
