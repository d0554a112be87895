"""Reading and editing gradients under `ShardedOptimizer`, and the memory they take."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, build
from tests.helpers.sharding import SCATTERED, Contest, backward, gap, in_ddp, series, sharded
from zerostep import ShardedOptimizer
from zerostep.step.sharded_grad import ShardedGradient

# Looking at gradients.


READINGS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda grad: grad.sum(),
    "plus": lambda grad: grad + 1,
    "reflected plus": lambda grad: 1 + grad,
    "times": lambda grad: grad * 2,
    "add in place": lambda grad: grad.add_(1.0),
    "plus in place": lambda grad: grad.__iadd__(torch.ones(grad.shape)),
    "norm": lambda grad: grad.norm(),
    "vector norm along a dimension": lambda grad: torch.linalg.vector_norm(grad, dim=0),
    "clone": lambda grad: grad.clone(),
    "item": lambda grad: grad[0],
    "list": lambda grad: grad.tolist(),
    "comparison": lambda grad: grad == 0,
    "not a number": lambda grad: torch.isnan(grad).any(),
    "largest": lambda grad: grad.abs().max(),
    "double": lambda grad: grad.double().tolist(),
    "data": lambda grad: grad.data,
    "multiplication by a tensor of its shape": lambda grad: grad.mul_(torch.ones(grad.shape)),
    "copy": lambda grad: torch.zeros(grad.shape).copy_(grad),
    "addition to another": lambda grad: torch.zeros(grad.shape).add_(grad),
    "stack": lambda grad: torch.stack([grad, grad]),
    "flat": lambda grad: grad.view(-1),
}


def _looking(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    backward(model, series(group, 1)[0])
    before = optimizer.grad_norm().item()
    for name, param in model.named_parameters():
        grad = param.grad
        assert isinstance(grad, ShardedGradient), name
        assert grad.shape == param.shape and grad.dtype == param.dtype and grad.device == param.device
        assert "ShardedGradient" in f"{grad} {grad!r}" and str(tuple(param.shape)) in str(grad)
        assert not grad.requires_grad and grad.grad_fn is None and not grad.is_sparse
        for reading, read in READINGS.items():
            with pytest.raises(RuntimeError, match=r'clip_grad_norm_.*reduction="all"'):
                print(f"{name}: {reading} gave {read(grad)!r}")
        with pytest.raises((RuntimeError, TypeError)):
            grad.numpy()
    assert optimizer.grad_norm().item() == before  # nothing was changed by trying
    optimizer.step()


@pytest.mark.parametrize("way", SCATTERED)
def test_a_gradient_that_went_to_its_owners_cannot_be_read(pool: Pool, way: str) -> None:
    pool.run(_looking, 2, way)


def _whole(group: ProcessGroup, way: str) -> None:
    model, _kept = Contest().sharded(group, way)
    twin = in_ddp(group, build())
    for batch in series(group, 2):
        for each in (model, twin):
            each.zero_grad()
            backward(each, batch)
        found = {str(number): param.grad for number, param in enumerate(model.parameters()) if param.grad is not None}
        wanted = {str(number): param.grad for number, param in enumerate(twin.parameters()) if param.grad is not None}
        if dist.get_world_size(group) < 3 or way == "wrapped all":
            assert_same_bits(found, wanted)
        assert gap(found, wanted) < 1e-6
        assert all(type(grad) is Tensor for grad in found.values())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("way", ["bare all", "wrapped all"])
def test_whole_gradients_are_there_for_everyone_after_backward(pool: Pool, way: str, world: int) -> None:
    pool.run(_whole, world, way)


def _edited(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        for number, param in enumerate(model.parameters()):
            assert param.grad is not None
            if number % 3 == 0:
                param.grad.mul_(0.5)
            elif number % 3 == 1:
                param.grad.div_(2)
            else:
                param.grad.clamp_(-0.05, 0.05)
        optimizer.step()


def _editing(group: ProcessGroup) -> None:
    Contest().run(group, _edited)


@pytest.mark.parametrize("world", [1, 2])
def test_changing_gradients_element_by_element_equals_plain(pool: Pool, world: int) -> None:
    pool.run(_editing, world)


# Memory.


class Tower(nn.Module):
    """Layers of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def _live_bytes() -> int:
    """The memory of all tensors that Python knows, each storage once."""
    gc.collect()
    with torch._C._DisableTorchDispatch():
        tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if _has_memory(t)}
    return sum(storages.values())


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _gradient_memory(group: ProcessGroup) -> tuple[int, int, int]:
    model = Tower()
    optimizer = sharded(group, model, bucket_mb=32 * 33 * 4 / 2**20)
    inputs = torch.randn(2, 32)
    before, held = _live_bytes(), 0
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        held = max(held, _live_bytes() - before - _state_bytes(optimizer))
        optimizer.step()
    sums = optimizer._training.engine.sums.parts
    return held, sum(part.nbytes for part in sums.values()), optimizer.stats().buckets


def _state_bytes(optimizer: ShardedOptimizer) -> int:
    tensors = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_take_their_share_of_memory_and_a_few_buckets(pool: Pool, world: int) -> None:
    whole, bucket = 12 * 32 * 33 * 4, 32 * 33 * 4
    for held, settled, buckets in pool.run(_gradient_memory, world):
        assert buckets >= 12
        assert whole / world <= settled <= 1.02 * whole / world + 64
        assert settled <= held <= whole / world + 3 * bucket + 64
