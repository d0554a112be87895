"""Programs that `ShardedOptimizer` refuses by name, on every rank."""

import pytest
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import SGD

from tests.helpers.pool import Pool
from tests.helpers.sharding import WAYS, Contest, backward, series
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer


def _step_without_sync(group: ProcessGroup, way: str) -> str:
    model, optimizer = Contest().sharded(group, way)
    batches = series(group, 2)
    with optimizer.no_sync():
        backward(model, batches[0])
        with pytest.raises(RuntimeError, match=r"step\(\) was called inside no_sync\(\)") as caught:
            optimizer.step()
    backward(model, batches[1])
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_reduced_gradients_is_refused(pool: Pool, way: str) -> None:
    texts = pool.run(_step_without_sync, 2, way)
    assert len(set(texts)) == 1


class _OneMemory(nn.Module):
    """Two parameters over the same memory: not one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Parameter(self.first.weight.detach()[1:3])
        self.neighbour = nn.Parameter(nn.Linear(8, 4).weight.detach())


def _shared_memory(group: ProcessGroup, kind: str) -> str:
    model = _OneMemory()
    with pytest.raises(ValueError, match="share memory") as caught:
        if kind == "sharded":
            ShardedOptimizer(model, SGD, process_group=group, lr=0.1)
        else:
            named, views = model.named_parameters(), kind == "zero views"
            ZeroRedundancyOptimizer(named, SGD, group, parameters_as_bucket_view=views, lr=0.1)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sharded", "zero", "zero views"])
def test_parameters_over_the_same_memory_are_refused(pool: Pool, kind: str) -> None:
    for text in pool.run(_shared_memory, 2, kind):
        assert "'first.weight' and 'second'" in text or "'second' and 'first.weight'" in text


def _neighbours(group: ProcessGroup) -> None:
    """Views of one tensor that do not overlap are parameters like any other."""
    whole = nn.Linear(4, 6).weight.detach()
    model = nn.ParameterList([nn.Parameter(whole[:2]), nn.Parameter(whole[2:])])
    optimizer = ShardedOptimizer(model, SGD, process_group=group, lr=0.1)
    (model[0].sum() + 2 * model[1].sum()).backward()
    optimizer.step()


def test_neighbours_in_one_tensor_are_accepted(pool: Pool) -> None:
    pool.run(_neighbours, 2)
