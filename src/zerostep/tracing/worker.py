"""One rank of a traced script: runs it as `python script.py` would, and profiles one step.

`python -m zerostep.tracing.worker FOLDER STEP SCRIPT [ARGUMENTS...]`. The rank's trace goes into the folder. After it
is written the script is held, because other ranks may still need what this one has sent, until the parent lets go.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from zerostep.tracing.events import MARK

__all__ = ["StepCounter", "main", "trace_file"]

_OUTSIDE = ("zerostep.tracing", "zerostep.demo")


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank puts its trace."""
    return folder / f"rank{rank}.json"


class StepCounter:
    """Counts the steps of the first optimizer that the script steps; optimizers inside of others do not count.

    Profiles from the call of the step before the wanted one, so that what it sends is seen to set out.
    """

    def __init__(self, step: int, path: Path) -> None:
        self._wanted, self._path = step, path
        self._clock: int | None = None
        self._depth = self.steps = 0
        self._profile: Any = None

    def before(self, optimizer: Any, *_: Any) -> None:
        """A step begins."""
        if self._clock is None and not _inside_zerostep():
            self._clock = id(optimizer)
        if id(optimizer) == self._clock:
            self._depth += 1
            if self._depth == 1 and self.steps == self._wanted - 2:
                self._profile = profile(activities=_activities())
                self._profile.start()

    def after(self, optimizer: Any, *_: Any) -> None:
        """A step has ended."""
        if id(optimizer) != self._clock:
            return
        self._depth -= 1
        if self._depth:
            return
        self.steps += 1
        with record_function(f"{MARK}{self.steps}"):
            pass
        if self.steps == self._wanted:
            self._write()

    def _write(self) -> NoReturn:
        self._profile.stop()
        draft = self._path.with_suffix(".part")
        self._profile.export_chrome_trace(str(draft))
        draft.replace(self._path)
        _hold()


def _inside_zerostep() -> bool:
    """Whether a step is made by this library: an inner one, or one of those by which it learns about a class."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("zerostep.") and not name.startswith(_OUTSIDE):
            return True
        frame = frame.f_back
    return False


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def _hold() -> NoReturn:
    """Until the parent closes its end of the pipe, or is gone; then leave without asking anyone."""
    sys.stdout.flush()
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Run the script; the number of steps it made is left behind if they were too few."""
    folder, step, script, *arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    counter = StepCounter(int(step), trace_file(Path(folder), rank))
    register_optimizer_step_pre_hook(counter.before)
    register_optimizer_step_post_hook(counter.after)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    Path(folder, f"steps{rank}").write_text(str(counter.steps))


if __name__ == "__main__":
    main()
