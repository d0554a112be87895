"""How a framework that writes one file per optimizer saves and loads one whose state is divided among ranks.

The framework's own file gets the name of a checkpoint directory beside it, which all ranks have written together; or,
if asked, the whole state dict in `torch.optim`'s format.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zerostep.checkpoint.export import consolidate
from zerostep.checkpoint.load import load
from zerostep.checkpoint.save import save
from zerostep.comm.agreement import agreed
from zerostep.optim.base import PartitionedOptimizer
from zerostep.optim.view import unwrapped, view_of

_KEY = "zerostep_checkpoint"
_UNFINISHED = ".new"


def is_partitioned(optimizer: Any) -> bool:
    """Whether an optimizer is one of this package, perhaps inside a framework's wrapper."""
    return isinstance(unwrapped(optimizer), PartitionedOptimizer)


class OptimizerFiles:
    """Stands in for an optimizer while a framework saves or loads; `number` tells several of one folder apart.

    `write` and `load_state_dict` are collective. Frameworks call `state_dict` on all ranks or on one: it is local.
    """

    def __init__(self, optimizer: Any, number: int, torch_format: bool) -> None:
        self._optimizer, self._torch_format = unwrapped(optimizer), torch_format
        self._name = f"optimizer_{number}.zerostep" if number else "optimizer.zerostep"
        self._folder: Path | None = None

    def use(self, folder: str | Path) -> None:
        """Tell the framework's folder for this save or load."""
        self._folder = Path(folder)

    def write(self) -> None:
        """Write the checkpoint directory, in place of one of the same name; or collect the state on rank 0."""
        if self._torch_format:
            self._optimizer.consolidate_state_dict(to=0)
        else:
            self._write_over(self._path(self._name))

    def _write_over(self, path: Path) -> None:
        everyone, unfinished = view_of(self._optimizer).everyone(), path.with_name(path.name + _UNFINISHED)
        with agreed(everyone):
            if everyone.rank == 0 and unfinished.exists():
                shutil.rmtree(unfinished)
        save(unfinished, self._optimizer)
        with agreed(everyone):
            if everyone.rank == 0:
                if path.exists():
                    shutil.rmtree(path)
                unfinished.rename(path)

    def state_dict(self) -> dict[str, Any]:
        """Return what the framework's file gets."""
        if not self._torch_format:
            return {_KEY: self._name}
        # Accelerate asks all ranks, and writes what rank 0 has.
        whole: dict[str, Any] = self._optimizer.state_dict() if self._optimizer.rank == 0 else {}
        return whole

    def release(self) -> None:
        """Free what was collected."""
        if self._torch_format:
            self._optimizer.release_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the directory that the framework's file names, or the state dict that it is."""
        name = state_dict.get(_KEY)
        if name is None:
            self._optimizer.load_state_dict(state_dict)
        elif is_partitioned(self._optimizer):
            load(self._path(name), self._optimizer)
        else:
            self._load_whole(self._path(name))

    def _load_whole(self, path: Path) -> None:
        """Load into an optimizer that is not divided, as in a single process."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "optimizer.pt"
            consolidate(path, file)
            self._optimizer.load_state_dict(torch.load(file, weights_only=True))

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object of a framework another attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
