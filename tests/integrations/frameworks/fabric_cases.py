"""A program for ranks: what `test_fabric.py` compares. Each case is a loop with Fabric, plain and sharded.

The arguments are the folder for results, `train` or `resume` (from what `train` has saved), and the number of ranks.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import AdamW

import zerostep
from tests.integrations.frameworks.launch import error_of, report, still_there
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer, hook_with_zero_step_interleaved

FOLDER, WORLD = Path(sys.argv[1]), int(sys.argv[3])
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
CLASSES: dict[str, Any] = {
    "plain": AdamW,
    "sharded": ShardedOptimizer,
    "zero": ZeroRedundancyOptimizer,
    "overlap": ZeroRedundancyOptimizer,
}
FABRIC = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
BF16 = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp", precision="bf16-mixed")


def network(seed: int = 0) -> nn.Module:
    """Return a small network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1))


def build(model: nn.Module, kind: str) -> Any:
    """Return an optimizer for a module, bare or wrapped."""
    if kind.startswith("sharded"):
        how: dict[str, Any] = {"gather": "forward"} if "forward" in kind else {}
        return ShardedOptimizer(model, AdamW, **how, reduction="all" if "all" in kind else "scatter", **ADAMW)
    if kind.startswith(("zero", "overlap")):
        options: dict[str, Any] = {"parameters_as_bucket_view": "views" in kind, "overlap_with_ddp": kind == "overlap"}
        return ZeroRedundancyOptimizer(model.named_parameters(), AdamW, **options, **ADAMW)
    return AdamW(model.named_parameters(), **ADAMW)


def setup(kind: str, seed: int = 0, fabric: Fabric = FABRIC) -> tuple[Any, Any]:
    """Return the module and the optimizer as Fabric wraps them; built one after the other if the kind says so."""
    model = network(seed)
    if "after" in kind:
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(build(wrapped, kind))
    else:
        wrapped, optimizer = fabric.setup(model, build(model, kind))
    assert isinstance(optimizer, CLASSES[kind.split("-")[0]])
    if kind == "overlap":
        ddp: Any = wrapped._forward_module
        ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, optimizer.optimizer))
    return wrapped, optimizer


def steps(model: Any, optimizer: Any, first: int = 0, count: int = 3, **how: Any) -> None:
    """Train; each step has its own data on each rank."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        passes = 2 if "accumulate" in how else 1
        for number in range(passes):
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + FABRIC.global_rank)
            inputs = torch.randn(4, 6, generator=generator)
            with FABRIC.no_backward_sync(model, enabled=number + 1 < passes):
                FABRIC.backward(model(inputs).square().mean())
        if "max_norm" in how or "clip_val" in how:
            FABRIC.clip_gradients(model, optimizer, **how)
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    """Return a copy of all parameters, as one tensor."""
    return torch.cat([param.detach().flatten() for param in model.parameters()]).clone()


HOW: dict[str, dict[str, Any]] = {
    "train": {},
    "clip": {"max_norm": 0.05},
    "clip_value": {"clip_val": 0.01},
    "accumulate": {"accumulate": True},
    "bf16": {},
}


@cache
def trained(kind: str, how: str) -> Tensor:
    """Return the weights after training."""
    model, optimizer = setup(kind, fabric=BF16 if how == "bf16" else FABRIC)
    steps(model, optimizer, **HOW[how])
    return weights(model)


def compare(kind: str, how: str) -> float:
    """Return the difference to plain training."""
    return float((trained(kind, how) - trained("plain", how)).abs().max())


def with_closure(kind: str) -> float:
    """Steps with a closure; the difference to plain ones."""
    found = []
    for each in (kind, "plain"):
        model, optimizer = setup(each)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.full((2, 6), 1.0 + FABRIC.global_rank)).square().mean()
            FABRIC.backward(loss)
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        found.append(torch.cat([weights(model), torch.tensor(losses)]))
    return float((found[0] - found[1]).abs().max())


def saved(kind: str) -> list[float]:
    """Save after three steps and go on in fresh objects, ours and plain."""
    found = []
    for each in (kind, "plain"):
        model, optimizer = setup(each)
        steps(model, optimizer)
        FABRIC.save(FOLDER / f"{each}.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
        steps(model, optimizer, 3)
        found += [weights(model), resumed(each, FOLDER / f"{each}.ckpt")]
    return [float((other - found[0]).abs().max()) for other in found[1:]]


def resumed(kind: str, path: Path) -> Tensor:
    """Return the weights after three further steps from a checkpoint."""
    model, optimizer = setup(kind, seed=9)
    left = FABRIC.load(path, {"model": model, "optimizer": optimizer})
    steps(model, optimizer, left["step"])
    return weights(model)


def exchanged(kind: str) -> list[float]:
    """Resume ours from the plain checkpoint, and plain from ours; the differences to plain from plain."""
    plain = resumed("plain", FOLDER / "plain.ckpt")
    pairs = (kind, "plain"), ("plain", kind)
    return [float((resumed(each, FOLDER / f"{file}.ckpt") - plain).abs().max()) for each, file in pairs]


def own_format(kind: str) -> float:
    """Save and load through the wrapper with zerostep's own functions; the difference between the two runs."""
    model, optimizer = setup(kind)
    steps(model, optimizer)
    zerostep.save(FOLDER / f"{kind}-own", optimizer, model)
    other, fresh = setup(kind, seed=9)
    zerostep.load(FOLDER / f"{kind}-own", fresh, other)
    for each, its in ((model, optimizer), (other, fresh)):
        steps(each, its, 3)
    return float((weights(model) - weights(other)).abs().max())


def teardown(kind: str) -> list[str]:
    """Train, and drop everything. Return the classes of what is still there."""
    model, optimizer = setup(kind)
    steps(model, optimizer)
    check = still_there([model.module, optimizer.optimizer])
    del model, optimizer
    return check()


def main() -> None:
    """Run the cases."""
    FABRIC.launch()
    BF16.launch()
    main_kinds, all_kinds = ("sharded", "zero"), ("sharded", "zero", "overlap")
    more = ("sharded-after", "sharded-all", "sharded-all-after", "sharded-forward", "zero-after", "zero-views")
    cases: dict[str, Callable[[], Any]] = {}
    if sys.argv[2] == "train":
        cases |= {f"{kind}-{how}": partial(compare, kind, how) for kind in main_kinds for how in HOW}
        cases |= {f"overlap-{how}": partial(compare, "overlap", how) for how in ("train", "accumulate", "bf16")}
        cases |= {f"{kind}-train": partial(compare, kind, "train") for kind in more}
        cases |= {f"{kind}-accumulate": partial(compare, kind, "accumulate") for kind in more}
        cases |= {f"{kind}-closure": partial(with_closure, kind) for kind in main_kinds}
        cases |= {f"{kind}-saved": partial(saved, kind) for kind in all_kinds}
        cases |= {f"{kind}-exchanged": partial(exchanged, kind) for kind in all_kinds}
        cases |= {f"{kind}-teardown": partial(teardown, kind) for kind in ("plain", *all_kinds)}
        cases |= {f"{kind}-own": partial(own_format, kind) for kind in main_kinds}
        cases["overlap-clip"] = partial(
            error_of, partial(trained, "overlap", "clip")
        )  # last: it leaves ranks within a step
    else:
        cases |= {f"{kind}-elsewhere-{WORLD}": partial(exchanged, kind) for kind in all_kinds}
    report(FOLDER, FABRIC.global_rank, cases)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
