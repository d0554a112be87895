"""What `tests/test_wheel.py` runs as one of two ranks with the installed package: python wheel_program.py RANK."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import zerostep

RANKS = 2
STEPS = 3
EXTRAS = ("typer", "rich", "matplotlib")


def main(rank: int) -> None:
    """Be this rank; the current directory is where the ranks meet and write."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=RANKS)
    train()
    checkpoint()
    dist.barrier()  # a rank that leaves early closes its sockets under the other
    dist.destroy_process_group()


def train() -> None:
    """With the declared dependencies alone: all of the library imports, and both classes train like plain DDP."""
    assert Path(zerostep.__file__).is_relative_to(sys.prefix), zerostep.__file__
    assert not [name for name in EXTRAS if find_spec(name)], "the environment has more than the package declares"
    for module in pkgutil.walk_packages(zerostep.__path__, "zerostep."):
        if not module.name.startswith("zerostep.tools"):
            importlib.import_module(module.name)
    plain, dropped_in, sharded = with_ddp(plain_adamw), with_ddp(zerostep_adamw), with_sharded()
    assert not equal(plain, list(make_model().parameters())), "nothing was trained"
    assert equal(plain, dropped_in), "ZeroRedundancyOptimizer differs from plain DDP"
    assert equal(plain, sharded), "ShardedOptimizer differs from plain DDP"


def with_ddp(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
    """The parameters after training under DDP."""
    model = DDP(make_model())
    run_steps(model, make_optimizer(model))
    return list(model.parameters())


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=0.1)


def zerostep_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return zerostep.ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)


def with_sharded() -> list[Tensor]:
    """The parameters after training with gradients and state sharded."""
    model = make_model()
    run_steps(model, zerostep.ShardedOptimizer(model, AdamW, lr=0.1))
    return list(model.parameters())


def checkpoint() -> None:
    """What one optimizer saves, another one loads, and both go on alike."""
    first, second = make_model(), make_model()
    saving = zerostep.ShardedOptimizer(first, AdamW, lr=0.1)
    run_steps(first, saving)
    zerostep.save("checkpoints/step-3", saving, first, extra={"epoch": 3})
    loading = zerostep.ShardedOptimizer(second, AdamW, lr=0.1)
    newest = zerostep.latest("checkpoints")
    assert newest is not None
    assert zerostep.load(newest, loading, second).extra == {"epoch": 3}
    assert equal(list(first.parameters()), list(second.parameters())), "loaded parameters differ"
    for model, optimizer in ((first, saving), (second, loading)):
        run_steps(model, optimizer)
    assert equal(list(first.parameters()), list(second.parameters())), "training went on differently"


def make_model() -> nn.Module:
    """The same small model every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on data of this rank's own."""
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 7)).square().mean().backward()
        optimizer.step()


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Bit equality."""
    return all(map(torch.equal, left, right))


if __name__ == "__main__":
    main(int(sys.argv[1]))
