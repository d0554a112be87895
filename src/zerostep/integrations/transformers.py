"""`enable`: train with a stock `transformers.Trainer` and a sharded optimizer, with all of Trainer's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zerostep.integrations import accelerate
from zerostep.integrations.optimizer_files import OptimizerFiles, is_partitioned, replaced
from zerostep.optim.sharded import ShardedOptimizer
from zerostep.optim.zero import ZeroRedundancyOptimizer

T = TypeVar("T")
OurClass = type[ShardedOptimizer] | type[ZeroRedundancyOptimizer]


def enable(
    trainer: T, optimizer_class: OurClass = ShardedOptimizer, *, torch_format: bool = False, **options: Any
) -> T:
    """Let a `transformers.Trainer` train with a sharded optimizer, save its state and resume. Returns the same trainer.

    Call it on all ranks, before `trainer.train()`. The optimizer is the one of the training arguments (`optim`,
    `learning_rate`, `weight_decay` and so on), sharded; one that was given as `Trainer(optimizers=...)` is left as it
    is. Checkpoints get a directory `optimizer.zerostep`, as `zerostep.save` writes it, and resume at any number of
    ranks. In a run of one process without a process group nothing is sharded, and such checkpoints resume too.

    Arguments:
        trainer: the `Trainer`.
        optimizer_class: `zerostep.ShardedOptimizer`, for a model without DDP, or `zerostep.ZeroRedundancyOptimizer`.
        torch_format: write the whole state into Trainer's own `optimizer.pt`, in the format of the unsharded optimizer;
            rank 0 collects it in host memory. Both forms are loaded, whatever this says.
        **options: further options for `optimizer_class`, such as `gather="forward"`.
    """
    _Checkpoints(trainer, torch_format).install()
    builder = _Builder(trainer, optimizer_class, options, torch_format)
    builder.install()
    return trainer


class _Builder:
    """Builds Trainer's optimizer; takes the place of `Trainer(optimizer_cls_and_kwargs=...)`."""

    def __init__(self, trainer: Any, optimizer_class: OurClass, options: dict[str, Any], torch_format: bool) -> None:
        self._trainer, self._class, self._options, self._torch_format = trainer, optimizer_class, options, torch_format
        self._given = trainer.optimizer_cls_and_kwargs

    def install(self) -> None:
        """Let the trainer call this object for its optimizer, if it was given none."""
        accelerate.enable(self._trainer.accelerator, torch_format=self._torch_format)
        if self._trainer.optimizer is None:
            # Trainer calls what is not an optimizer class for a factory, and the factory with the model.
            self._trainer.optimizer_cls_and_kwargs = (lambda: self, {})

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the training arguments, sharded."""
        trainer = self._trainer
        accelerate.enable(trainer.accelerator, torch_format=self._torch_format)  # each trial of a search has its own
        chosen, defaults = self._given or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        if not (isinstance(chosen, type) and issubclass(chosen, Optimizer)) or "params" in defaults:
            raise ValueError(
                f"the optimizer {trainer.args.optim!r} of the training arguments divides the parameters itself, so it "
                "cannot be sharded as it is: give Trainer a sharded optimizer, as in optimizers=(optimizer, None)"
            )
        groups = self._groups(model)
        if not dist.is_initialized():
            return chosen(groups, **defaults)
        if issubclass(self._class, ShardedOptimizer):
            return self._class(model, chosen, groups, **self._options, **defaults)
        return self._class(groups, chosen, **self._options, **defaults)

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Trainer's own groups, with the names of the parameters."""
        decayed = set(self._trainer.get_decay_parameter_names(model))
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        return [
            {
                "params": [pair for pair in trained if pair[0] in decayed],
                "weight_decay": self._trainer.args.weight_decay,
            },
            {"params": [pair for pair in trained if pair[0] not in decayed], "weight_decay": 0.0},
        ]


class _Checkpoints:
    """Trainer's two methods for the optimizer's files, each around Trainer's own; all ranks call both."""

    def __init__(self, trainer: Any, torch_format: bool) -> None:
        self._trainer, self._torch_format = trainer, torch_format
        self._own_save: Callable[[str], None] = trainer._save_optimizer_and_scheduler
        self._own_load: Callable[[str | None], None] = trainer._load_optimizer_and_scheduler

    def install(self) -> None:
        """Take the places of the trainer's methods."""
        self._trainer._save_optimizer_and_scheduler = self.save
        self._trainer._load_optimizer_and_scheduler = self.load

    def save(self, output_dir: str) -> None:
        """Write the optimizer's directory, then what Trainer writes."""
        if not is_partitioned(self._trainer.optimizer):
            self._own_save(output_dir)
            return
        files = self._files(output_dir)
        files.write()
        try:
            with replaced(self._trainer, "optimizer", files):
                self._own_save(output_dir)
        finally:
            files.release()

    def load(self, checkpoint: str | None) -> None:
        """Load what Trainer loads; `optimizer.pt` may name the optimizer's directory."""
        if checkpoint is None:
            return
        with replaced(self._trainer, "optimizer", self._files(checkpoint)):
            self._own_load(checkpoint)

    def _files(self, folder: str) -> OptimizerFiles:
        files = OptimizerFiles(self._trainer.optimizer, 0, self._torch_format)
        files.use(Path(folder))
        return files
