"""One rank of a traced script: runs it as `python script.py` would, and profiles one step.

`python -m zerostep.tools.tracing.worker FOLDER STEP SCRIPT [ARGUMENTS...]` writes the rank's trace into the folder. It
then blocks until the parent closes the pipe at standard input: other ranks may still receive what this one has sent.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from zerostep import ShardedOptimizer
from zerostep.step.labels import end_of_step, in_backward

_OUTSIDE = ("zerostep.tools.tracing", "zerostep.tools.demo")


def trace_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return folder / f"rank{rank}.json"


class StepCounter:
    """Counts the steps of the first optimizer that the script steps, and profiles the wanted one.

    Optimizers inside of others do not count. The profile starts with the call of the step before, so that it contains
    the launches of that step's messages. A step of DDP's hooks inside backward is no call of the script: it ends where
    the next forward pass begins. With `ShardedOptimizer(update="backward")` the script calls `step()`, which ends it.
    """

    def __init__(self, step: int, path: Path) -> None:
        self._wanted, self._path = step, path
        self._clock: int | None = None
        self._depth = self.steps = 0
        self._in_backward: bool | None = None
        self._sharded = False
        self._profile: Any = None

    def before(self, optimizer: Any, *_: Any) -> None:
        """Hook before every optimizer step of the process."""
        if self._clock is None and in_backward():
            self._note_step_in_backward()
        elif self._clock is None and not _is_inner_step():
            self._clock, self._sharded = id(optimizer), isinstance(optimizer, ShardedOptimizer)
        if id(optimizer) == self._clock:
            self._depth += 1
            if self._depth == 1 and self.steps == self._wanted - 2:
                self._start()

    def after(self, optimizer: Any, *_: Any) -> None:
        """Hook after every optimizer step of the process."""
        if id(optimizer) == self._clock:
            self._depth -= 1
            if not self._depth:
                self._count()

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Hook before every module's forward; DDP's, after a step inside backward, begins the next step."""
        if self._steps_in_backward and isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            if self.steps == self._wanted - 2:
                self._start()
            self._end_step_in_backward()

    def end_of_script(self) -> None:
        """Count a last step inside backward, which no forward pass follows; stop a profile whose step did not come."""
        if self._steps_in_backward:
            self._end_step_in_backward()
        if self._profile is not None:
            self._profile.stop()

    @property
    def _steps_in_backward(self) -> bool:
        """Whether a step inside backward is not counted yet; a script that calls step() is counted by its calls."""
        return bool(self._in_backward) and self._clock is None

    def _end_step_in_backward(self) -> None:
        self._in_backward = False
        self._count()

    def _note_step_in_backward(self) -> None:
        if self._in_backward is None:
            register_module_forward_pre_hook(self.before_forward)
        self._in_backward = True

    def _start(self) -> None:
        # A step of DDP's hooks runs on a thread that is older than the profile. Otherwise this one and autograd's do,
        # messages on others that outlive the profile must not be in it, and a profile of all threads would not contain
        # the ranges that are made only where a profiler runs.
        everywhere = self._in_backward is not None and not self._sharded
        config = _ExperimentalConfig(profile_all_threads=everywhere)
        self._profile = profile(activities=_activities(), experimental_config=config)
        self._profile.start()

    def _count(self) -> None:
        self.steps += 1
        with record_function(end_of_step(self.steps)):
            pass
        if self.steps == self._wanted:
            self._write()

    def _write(self) -> NoReturn:
        self._profile.stop()
        # The parent polls for the path, so the file must be complete when it gets that name.
        draft = self._path.with_suffix(".part")
        self._profile.export_chrome_trace(str(draft))
        draft.replace(self._path)
        _hold()


def _is_inner_step() -> bool:
    """Return whether this library makes the step: of an inner optimizer, or of a trial that shows what a class does."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("zerostep.") and not module.startswith(_OUTSIDE):
            return True
        frame = frame.f_back
    return False


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def _hold() -> NoReturn:
    """Block until the parent closes the pipe or dies; then exit without handlers, which may wait for other ranks."""
    sys.stdout.flush()
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Run the script; if it ends before the wanted step, write the number of its steps beside the trace."""
    folder, step, script, *arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    counter = StepCounter(int(step), trace_file(Path(folder), rank))
    register_optimizer_step_pre_hook(counter.before)
    register_optimizer_step_post_hook(counter.after)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    counter.end_of_script()
    Path(folder, f"steps{rank}").write_text(str(counter.steps))


if __name__ == "__main__":
    main()
