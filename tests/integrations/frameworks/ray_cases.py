"""A program that starts Ray: what `test_ray.py` compares. Each case is a loop in workers of a `TorchTrainer`.

The argument is the folder for results. One cluster runs three trainers: one trains and reports a checkpoint, and two
resume from it, with as many workers and with one more.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import zerostep
from tests.integrations.frameworks.launch import report
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
KINDS = ("sharded", "bare", "zero")
HOW = ("train", "clip", "accumulate", "bf16")
KEPT: list[Any] = []  # lives until Ray ends the worker


def build(kind: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a module as Ray prepares it, and an optimizer for it."""
    from ray.train.torch import prepare_model

    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1))
    model = prepare_model(network, parallel_strategy=None if kind == "bare" else "ddp")
    if kind in ("sharded", "bare"):
        return model, ShardedOptimizer(model, AdamW, **ADAMW)
    if kind == "zero":
        return model, ZeroRedundancyOptimizer(model.named_parameters(), AdamW, **ADAMW)
    return model, AdamW(model.named_parameters(), **ADAMW)


def steps(model: Any, optimizer: Any, first: int = 0, how: str = "train") -> None:
    """Take three steps, each with data of its own on each rank."""
    passes = 2 if how == "accumulate" else 1
    for step in range(first, first + 3):
        optimizer.zero_grad()
        for part in range(passes):
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
            with unsummed(model, optimizer) if part + 1 < passes else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
                    loss = model(torch.randn(4, 6, generator=generator)).square().mean()
                loss.backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def unsummed(model: Any, optimizer: Any) -> AbstractContextManager[None]:
    """Return the context in which gradients add up on each rank: DDP's, or the optimizer's if there is none."""
    context: AbstractContextManager[None] = model.no_sync() if bare(model) is not model else optimizer.no_sync()
    return context


def weights(model: nn.Module) -> Tensor:
    """Return a copy of all parameters, as one tensor."""
    return torch.cat([param.detach().flatten() for param in model.parameters()]).clone()


@cache
def trained(kind: str, how: str) -> Tensor:
    """Return the weights after training."""
    model, optimizer = build(kind)
    steps(model, optimizer, how=how)
    return weights(model)


def compare(kind: str, how: str) -> float:
    """Return the difference to plain training."""
    return float((trained(kind, how) - trained("plain", how)).abs().max())


def bare(model: Any) -> nn.Module:
    """Return the module inside DDP."""
    module: nn.Module = getattr(model, "module", model)
    return module


def save(folder: Path) -> None:
    """Write both forms of a checkpoint after three steps, report them to Ray, and note the weights after six."""
    from ray import train

    whole = {}
    for kind in ("plain", *KINDS):
        model, optimizer = build(kind)
        steps(model, optimizer)
        if kind != "plain":
            zerostep.save(folder / "reported" / f"{kind}.zerostep", optimizer, model)
            optimizer.consolidate_state_dict()
        if dist.get_rank() == 0:
            saved = {"model": bare(model).state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, folder / "reported" / f"{kind}.pt")
        steps(model, optimizer, 3)
        whole[kind] = weights(model)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    found = train.Checkpoint.from_directory(folder / "reported") if dist.get_rank() == 0 else None
    train.report({"steps": 3}, checkpoint=found)


@cache
def resumed(kind: str, form: str) -> Tensor:
    """Return the weights after three further steps from the checkpoint that Ray has."""
    from ray import train

    model, optimizer = build(kind, seed=9)
    checkpoint = train.get_checkpoint()
    assert checkpoint is not None
    with checkpoint.as_directory() as place:
        if form == "own":
            assert zerostep.load(Path(place, f"{kind}.zerostep"), optimizer, model).step == 3
        else:
            saved = torch.load(Path(place, f"{form}.pt"), weights_only=True)
            bare(model).load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, 3)
    return weights(model)


def resume(folder: Path, kind: str) -> list[float]:
    """Resume from our own form, from a state dict of ours and from one of plain training; differences to plain.

    The last number is the difference to the run that was not interrupted.
    """
    plain = resumed("plain", "plain")
    whole = torch.load(folder / "whole.pt", weights_only=True)[kind]
    found = [float((resumed(kind, form) - plain).abs().max()) for form in ("own", kind, "plain")]
    return [*found, float((resumed(kind, "own") - whole).abs().max())]


def leave_open(kind: str) -> None:
    """Leave an optimizer between backward and step, for Ray to end."""
    model, optimizer = build(kind)
    steps(model, optimizer)
    model(torch.ones(4, 6)).square().mean().backward()
    KEPT.append((model, optimizer))


def work(config: dict[str, Any]) -> None:
    """Be a worker: run the cases of this trainer."""
    folder = Path(config["folder"])
    cases: dict[str, Callable[[], Any]] = {}
    if config["part"] == "train":
        cases |= {f"{kind}-{how}": partial(compare, kind, how) for kind in KINDS for how in HOW}
        cases |= {f"{kind}-open": partial(leave_open, kind) for kind in KINDS}
        cases |= {"saved": partial(save, folder)}
    else:
        workers = dist.get_world_size()
        cases |= {f"{kind}-resumed-{workers}": partial(resume, folder, kind) for kind in KINDS}
    report(folder, dist.get_rank(), cases)


def main(folder: Path) -> None:
    """Start Ray, and the trainers one after the other."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tests.integrations.frameworks import ray_cases

    (folder / "reported").mkdir()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    for part, workers in (("train", 2), ("resume", 2), ("resume", 3)):
        result = TorchTrainer(
            ray_cases.work,
            train_loop_config={"folder": str(folder), "part": part},
            scaling_config=ScalingConfig(num_workers=workers),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(name="cases", storage_path=str(folder / "storage")),
        ).fit()
        assert result.error is None
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
