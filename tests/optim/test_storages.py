"""Parameters in flat memory have storages of their own: what other libraries make of a model after some steps."""

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW, Optimizer

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits
from tests.helpers.sharding import sharded, values
from zerostep import ZeroRedundancyOptimizer

Make = Callable[[ProcessGroup, nn.Module], Optimizer]
Read = Callable[[nn.Module, Path], None]


class Model(nn.Module):
    """Nine parameters: matrices, biases of odd lengths, an image in channels_last, a scalar and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 4))
        self.third = nn.Parameter(torch.randn(3, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(self.image(inputs).mean((2, 3)))) @ self.third * self.scale
        return outputs + self.empty.sum()


def _zero(group: ProcessGroup, model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, process_group=group, parameters_as_bucket_view=True, lr=0.1
    )


MAKERS: dict[str, Make] = {
    "sharded": sharded,
    "one bucket": lambda group, model: sharded(group, model, bucket_mb=1),
    "late": lambda group, model: sharded(group, model, gather="forward"),
    "in backward": lambda group, model: sharded(group, model, update="backward"),
    "masters": lambda group, model: sharded(group, model.bfloat16(), master_dtype=torch.float32),
    "zero": _zero,
}


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 3, 4, 4, dtype=dtype)).sum().backward()
    optimizer.step()


def _assert_loaded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    assert_same_bits(safetensors.torch.load_file(path), dict(sorted(tensors.items())))


def _saved_model(model: nn.Module, path: Path) -> None:
    safetensors.torch.save_model(model, str(path))
    _assert_loaded(path, values(model))


def _saved_file(model: nn.Module, path: Path) -> None:
    # Not the image: safetensors wants contiguous tensors.
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_contiguous()}
    safetensors.torch.save_file(tensors, path)
    _assert_loaded(path, tensors)


def _saved_by_torch(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)
    assert_same_bits(torch.load(path, weights_only=True), values(model))
    assert _size(model.state_dict()) == _size({name: x.clone() for name, x in model.state_dict().items()})


def _size(saved: Mapping[str, Tensor]) -> int:
    written = io.BytesIO()  # a path would be part of the content
    torch.save(dict(saved), written)
    return len(written.getvalue())


def _single_parameter_saved(model: nn.Module, path: Path) -> None:
    torch.save(model.get_parameter("first.bias"), path)
    assert path.stat().st_size < 3000
    assert torch.equal(torch.load(path), model.get_parameter("first.bias"))


def _by_storage(model: nn.Module, path: Path) -> None:
    # How Accelerate and transformers find tensors that share memory.
    storages = [param.untyped_storage() for param in model.parameters() if param.numel()]
    assert len({(storage.data_ptr(), storage.nbytes()) for storage in storages}) == len(storages)
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in model.parameters())


def _copied(model: nn.Module, path: Path) -> None:
    twin = copy.deepcopy(model)
    assert_same_bits(values(twin), values(model))
    with torch.no_grad():
        for param in twin.parameters():
            param.fill_(9)
    assert not any(bool((param == 9).any()) for param in model.parameters())


READERS: tuple[Read, ...] = (_saved_model, _saved_file, _saved_by_torch, _single_parameter_saved, _by_storage, _copied)


def _read_everywhere(group: ProcessGroup, kind: str, folder: Path) -> None:
    torch.manual_seed(3)
    model = Model()
    optimizer = MAKERS[kind](group, model)
    for read in READERS:
        _step(model, optimizer)
        read(model, folder / f"{read.__name__}-{torch.distributed.get_rank(group)}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_library_finds_every_parameter(pool: Pool, kind: str, world: int, tmp_path: Path) -> None:
    pool.run(_read_everywhere, world, kind, tmp_path)


def _bound_again(group: ProcessGroup, kind: str) -> None:
    """Whatever made new views of the flat memory: values set, moved, loaded, parameters added and unfrozen."""
    torch.manual_seed(3)
    model, more = Model(), nn.Parameter(torch.ones(3))
    model.second.bias.requires_grad_(False)
    optimizer = MAKERS[kind](group, model)
    _step(model, optimizer)
    model.first.weight.data = model.first.weight.data.clone()
    _step(model, optimizer)
    optimizer.zero_grad()
    model.share_memory()
    _step(model, optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=False)
    model.second.bias.requires_grad_(True)
    _step(model, optimizer)
    optimizer.add_param_group({"params": [("more", more)]})
    model.more = more
    _step(model, optimizer)
    _by_storage(model, Path())


@pytest.mark.parametrize("kind", ["sharded", "one bucket", "late", "in backward", "zero"])
def test_parameters_that_were_bound_again_keep_storages_of_their_own(pool: Pool, kind: str) -> None:
    pool.run(_bound_again, 2, kind)
