"""A program for ranks: what `test_accelerate.py` compares. Each case runs a loop with Accelerate, plain and sharded.

The first argument is the folder for results, the second names the cases: `train`, or `resume` (from what `train` has
saved). In a process without a launcher, `resume` is about plain optimizers.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

import zerostep
from tests.integrations.frameworks.launch import error_of, report, still_there
from tests.integrations.frameworks.tiny import Tokens, difference, model, weights

FOLDER = Path(sys.argv[1])
KINDS = ("sharded", "zero", "overlap")
STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "train": {},
    "clip": {"clip": 0.05},
    "accumulate": {"accumulate": 2},
    "bf16": {"mixed_precision": "bf16"},
}


def optimizer_of(kind: str, module: nn.Module) -> Any:
    if kind == "sharded":
        return zerostep.ShardedOptimizer(module, torch.optim.AdamW, lr=1e-3)
    if kind in ("zero", "overlap"):
        return zerostep.ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, overlap_with_ddp=kind == "overlap", lr=1e-3
        )
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


@dataclass
class Run:
    """What Accelerate has prepared, and a loop over it."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    clip: float | None

    def train(self, first: int, last: int) -> Tensor:
        """Take the steps from `first` to `last`; the weights."""
        passes = self.accelerator.gradient_accumulation_steps
        for number, batch in enumerate(self.loader):
            if not first * passes <= number < last * passes:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return weights(self.model)


def prepared(
    kind: str,
    seed: int = 0,
    clip: float | None = None,
    accumulate: int = 1,
    torch_format: bool = False,
    enable: bool | None = None,
    **options: Any,
) -> Run:
    AcceleratorState._reset_state()  # options of one accelerator are those of the process; the group stays
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    if kind != "plain" if enable is None else enable:
        zerostep.integrations.accelerate.enable(accelerator, torch_format=torch_format)
    set_seed(3)
    module = model(seed)
    optimizer = optimizer_of(kind, module)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    loader = DataLoader(Tokens(), batch_size=2)
    ready, wrapped, scheduler, loader = accelerator.prepare(module, optimizer, scheduler, loader)
    if kind == "overlap":
        ready.register_comm_hook(None, zerostep.hook_with_zero_step_interleaved(allreduce_hook, ready, optimizer))
    return Run(accelerator, ready, wrapped, scheduler, loader, clip)


@cache
def trained(kind: str, options: str) -> Tensor:
    """Return the weights after training."""
    run = prepared(kind, **OPTIONS[options])
    assert isinstance(run.model, nn.parallel.DistributedDataParallel) == (kind != "sharded")
    found = run.train(0, STEPS)
    assert difference(found, weights(model())) > 1e-3
    return found


def compare(kind: str, options: str) -> float:
    return difference(trained(kind, options), trained("plain", options))


def resume(kind: str, torch_format: bool = False) -> list[Any]:
    """Save at a step, twice into one folder, and go on from there in a new run.

    Return the optimizer's files, and the differences to plain training, of the first run and of the resumed one.
    """
    folder = FOLDER / (f"{kind}-torch" if torch_format else f"{kind}-saved")
    first = prepared(kind, torch_format=torch_format)
    first.train(0, 1)
    first.accelerator.save_state(str(folder))
    first.train(1, 2)
    first.accelerator.save_state(str(folder))
    uninterrupted = first.train(2, STEPS)
    second = prepared(kind, seed=9, torch_format=torch_format)
    second.accelerator.load_state(str(folder))
    resumed = second.train(2, STEPS)
    first.accelerator.wait_for_everyone()
    files = sorted(path.name for path in folder.iterdir() if path.name.startswith("optimizer"))
    return [files, *(difference(each, trained("plain", "train")) for each in (uninterrupted, resumed))]


def resume_plain(kind: str) -> float:
    """Load what `torch_format` has written into the plain optimizer."""
    run = prepared("plain", seed=9)
    run.accelerator.load_state(str(FOLDER / f"{kind}-torch"))
    return difference(run.train(2, STEPS), trained("plain", "train"))


def from_plain(kind: str) -> float:
    """Load what plain training has saved into the sharded optimizer."""
    run = prepared(kind, seed=9)
    run.accelerator.load_state(str(FOLDER / "plain-saved"))
    return difference(run.train(2, STEPS), trained("plain", "train"))


def named(kind: str) -> list[str]:
    """Save with automatic names, and load the newest. Return the folders."""
    from accelerate.utils import ProjectConfiguration

    place = FOLDER / f"{kind}-named"
    options = {"automatic_checkpoint_naming": True, "total_limit": 1}
    first = prepared(kind, project_config=ProjectConfiguration(str(place), **options))
    for step in range(2):
        first.train(step, step + 1)
        first.accelerator.save_state()
    first.accelerator.wait_for_everyone()
    second = prepared(kind, seed=9, project_config=ProjectConfiguration(str(place), **options))
    second.accelerator.load_state()
    assert difference(second.train(2, STEPS), trained("plain", "train")) == 0.0
    return sorted(path.name for path in (place / "checkpoints").iterdir())


def whole_model(kind: str) -> list[list[str]]:
    """Return the names of weights that `save_model` and `save_state` leave out, tied ones aside."""
    run = prepared(kind)
    run.train(0, 1)
    places = [FOLDER / f"{kind}-model", FOLDER / f"{kind}-state"]
    run.accelerator.save_model(run.model, str(places[0]))
    run.accelerator.save_state(str(places[1]))
    run.accelerator.wait_for_everyone()
    expected = {name for name, _ in run.accelerator.unwrap_model(run.model).named_parameters()}
    return [sorted(expected - stored_names(place / "model.safetensors")) for place in places]


def stored_names(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        return {str(name).removeprefix("module.") for name in opened.keys()}  # noqa: SIM118


def wrapped(kind: str) -> list[float]:
    """`zerostep.save` and `load` with the optimizer as Accelerate has wrapped it."""
    first, second = prepared(kind), prepared(kind, seed=9)
    first.train(0, 2)
    zerostep.save(FOLDER / f"{kind}-wrapped", first.optimizer, first.model)
    zerostep.load(FOLDER / f"{kind}-wrapped", second.optimizer, second.model)
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    return [difference(each.train(2, STEPS), trained("plain", "train")) for each in (first, second)]


def resume_elsewhere(kind: str) -> float:
    """Go on with other ranks from a checkpoint of `resume`; the difference to plain training that does the same."""
    results = []
    for which in ("plain", kind):
        run = prepared(which, seed=9)
        run.accelerator.load_state(str(FOLDER / f"{which}-saved"))
        results.append(run.train(2, STEPS))
    return difference(*results)


def resume_unsharded(kind: str) -> float:
    """Go on with a plain optimizer from a checkpoint of `resume`; the difference to one that was always plain."""
    results = []
    for saved in ("plain", kind):
        run = prepared("plain", seed=9, enable=True)
        run.accelerator.load_state(str(FOLDER / f"{saved}-saved"))
        results.append(run.train(2, STEPS))
    return difference(*results)


def teardown(kind: str) -> list[str]:
    """Train, and drop everything. Return the classes of what is still there."""
    run = prepared(kind)
    run.train(0, 1)
    check = still_there([run.accelerator.unwrap_model(run.model), run.optimizer.optimizer])
    run.accelerator.free_memory()
    del run
    return check()


def forgotten() -> str:
    """Save without the line that enables it; the error, on every rank."""
    accelerator = Accelerator(cpu=True)
    plain = model()
    module, optimizer = accelerator.prepare(plain, optimizer_of("zero", plain))
    accelerator.backward(module(**next(iter(DataLoader(Tokens(), batch_size=2)))).loss)
    optimizer.step()
    try:
        accelerator.save_state(str(FOLDER / "forgotten"))
    except RuntimeError as error:
        return str(error)
    return ""


def cases(wanted: str) -> dict[str, Callable[[], Any]]:
    if wanted == "resume" and not dist.is_initialized():
        return {f"{kind}-unsharded": partial(resume_unsharded, kind) for kind in KINDS}
    if wanted == "resume":
        world = Accelerator(cpu=True).num_processes
        return {f"{kind}-elsewhere-{world}": partial(resume_elsewhere, kind) for kind in KINDS}
    found: dict[str, Callable[[], Any]] = {"forgotten": forgotten, "plain-resume": partial(resume, "plain")}
    for kind in KINDS:
        works = [options for options in OPTIONS if (kind, options) != ("overlap", "clip")]
        found |= {f"{kind}-{options}": partial(compare, kind, options) for options in works}
        found[f"{kind}-resume"] = partial(resume, kind)
        found[f"{kind}-teardown"] = partial(teardown, kind)
    for kind in ("sharded", "zero"):
        found[f"{kind}-torch"] = partial(resume, kind, torch_format=True)
        for case in (resume_plain, from_plain, named, wrapped, whole_model):
            found[f"{kind}-{case.__name__}"] = partial(case, kind)
    return found | {
        "overlap-clip": partial(error_of, partial(trained, "overlap", "clip"))
    }  # last: it leaves the ranks in the middle of a step


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)  # starts the process group
    report(FOLDER, accelerator.process_index, cases(sys.argv[2]))
    accelerator.end_training()
