"""A program for ranks: what `test_lightning.py` compares. Each case trains a stock Trainer, plain and sharded.

The first argument is the folder for results, the second names the cases: `train` or `resume` (from what `train` has
saved).
"""

import copy
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.frameworks.launch import error_of, report, still_there
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer, hook_with_zero_step_interleaved

FOLDER = Path(sys.argv[1])
STEPS = 4
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "train": {},
    "clip": {"gradient_clip_val": 0.05},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {},
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda module: AdamW(module.named_parameters(), **ADAMW),
    "sharded": lambda module: ShardedOptimizer(module, AdamW, **ADAMW),
    "sharded-net": lambda module: ShardedOptimizer(module.net, AdamW, **ADAMW),
    "sharded-ddp": lambda module: ShardedOptimizer(module.trainer.strategy.model, AdamW, **ADAMW),
    "sharded-all": lambda module: ShardedOptimizer(module, AdamW, reduction="all", **ADAMW),
    "sharded-forward": lambda module: ShardedOptimizer(module, AdamW, gather="forward", **ADAMW),
    "zero": lambda module: ZeroRedundancyOptimizer(module.named_parameters(), AdamW, **ADAMW),
    "zero-views": lambda module: ZeroRedundancyOptimizer(
        module.named_parameters(), AdamW, parameters_as_bucket_view=True, **ADAMW
    ),
    "overlap": lambda module: ZeroRedundancyOptimizer(module.named_parameters(), AdamW, overlap_with_ddp=True, **ADAMW),
}


class Module(lightning.LightningModule):
    """A small network with a scheduler; what `MAKERS` makes is its optimizer."""

    def __init__(self, kind: str, manual: bool = False, seed: int = 0) -> None:
        super().__init__()
        self._kind, self.automatic_optimization = kind, not manual
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1))

    def configure_optimizers(self) -> Any:
        """Return ours, and a scheduler over it, as in plain training."""
        optimizer = MAKERS[self._kind](self)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self) -> None:
        """In overlap mode the optimizer is part of DDP's hook."""
        if self._kind == "overlap":
            ddp: Any = self.trainer.strategy.model
            (optimizer,) = self.trainer.optimizers
            ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, optimizer))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss; in manual optimization make the step, too."""
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=10.0)
            optimizer.step()
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Look at the parameters."""
        self.net(batch[0])


def batches() -> DataLoader[Any]:
    """Return the same data in every run; Lightning divides it among the ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(96, 6, generator=generator), torch.randn(96, 1, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=3)


def fit(module: Module, steps: int, path: Path | None = None, **options: Any) -> lightning.Trainer:
    """Train to this step; `path` is a checkpoint to go on from."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[3]),
        strategy="ddp",
        max_steps=steps,
        logger=False,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"enable_checkpointing": False} | options),
    )
    trainer.fit(module, batches(), ckpt_path=path)
    return trainer


def weights(module: nn.Module) -> Tensor:
    """Return a copy of all parameters, as one tensor."""
    return torch.cat([param.detach().flatten() for param in module.parameters()]).clone()


def difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference of two tensors of one shape."""
    return float((left - right).abs().max())


@cache
def trained(kind: str, options: str) -> Tensor:
    """Return the weights after training."""
    module = Module(kind, options == "manual")
    fit(module, STEPS, **OPTIONS[options])
    found = weights(module)
    assert difference(found, weights(Module(kind))) > 1e-3
    return found


def compare(kind: str, options: str) -> float:
    """Return the difference to plain training."""
    return difference(trained(kind, options), trained("plain", options))


def saved(kind: str) -> list[float]:
    """Train two steps, save, and train two further steps in a second run; do the same with the plain optimizer.

    Return the differences after the first and the second run. Lightning begins the data anew when it resumes.
    """
    found = []
    for each in (kind, "plain"):
        first = Module(each)
        path = FOLDER / f"{each}.ckpt"
        saving = ModelCheckpoint(FOLDER, each, every_n_train_steps=2, save_top_k=-1, enable_version_counter=False)
        fit(first, 2, enable_checkpointing=True, callbacks=[saving])
        found.append((weights(first), resumed(each, path)))
    (first_ours, second_ours), (first_plain, second_plain) = found
    return [difference(first_ours, first_plain), difference(second_ours, second_plain)]


def resumed(kind: str, path: Path) -> Tensor:
    """Return the weights after two further steps from a checkpoint."""
    module = Module(kind, seed=9)
    fit(module, STEPS, path)
    return weights(module)


def exchanged(kind: str) -> list[float]:
    """Resume ours from the plain checkpoint, and plain from ours."""
    plain = resumed("plain", FOLDER / "plain.ckpt")
    return [
        difference(resumed(kind, FOLDER / "plain.ckpt"), plain),
        difference(resumed("plain", FOLDER / f"{kind}.ckpt"), plain),
    ]


def twice(kind: str) -> float:
    """Fit a module, look at it, and fit it again, with another optimizer; the difference to plain."""
    found = []
    for each in (kind, "plain"):
        module = Module(each)
        trainer = fit(module, 2)
        trainer.validate(module, batches(), verbose=False)
        copy.deepcopy(module.net).double().zero_grad()
        fit(module, 2)
        found.append(weights(module))
    return difference(*found)


def teardown(kind: str) -> list[str]:
    """Train, and drop everything. Return the classes of what is still there."""
    module = Module(kind)
    trainer = fit(module, 1)
    check = still_there([module, *trainer.optimizers])
    del module, trainer
    return check()


def main() -> None:
    """Run the cases."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kinds, main_kinds = [kind for kind in MAKERS if kind != "plain"], ("sharded", "zero")
    all_kinds = (*main_kinds, "overlap")
    cases: dict[str, Callable[[], Any]] = {}
    if sys.argv[2] == "train":
        cases |= {f"{kind}-train": partial(compare, kind, "train") for kind in kinds}
        for options in OPTIONS:
            cases |= {f"{kind}-{options}": partial(compare, kind, options) for kind in main_kinds}
        cases |= {f"{kind}-saved": partial(saved, kind) for kind in all_kinds}
        cases |= {f"{kind}-exchanged": partial(exchanged, kind) for kind in all_kinds}
        cases |= {f"{kind}-teardown": partial(teardown, kind) for kind in ("plain", *all_kinds)}
        cases |= {f"{kind}-twice": partial(twice, kind) for kind in main_kinds}
        cases |= {f"overlap-{options}": partial(compare, "overlap", options) for options in ("accumulate", "bf16")}
        cases["overlap-clip"] = partial(
            error_of, partial(trained, "overlap", "clip")
        )  # last: it leaves ranks within a step
    else:
        world = int(sys.argv[3])
        cases |= {f"{kind}-elsewhere-{world}": partial(exchanged, kind) for kind in all_kinds}
    report(FOLDER, int(os.environ["RANK"]), cases)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
