"""All-gathers of parameters that are in flight, and who waits for them.

With `gather="forward"` new parameters are sent while the next forward pass runs. Each module waits for its own before
it runs, and whoever else uses a parameter waits by its class: see `late_params`. The hooks of modules are there for
code that reads memory without torch's functions, and for torch.compile, which then waits between its graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler

from zerostep.comm.exchange import PendingGather
from zerostep.step.labels import PhaseTimer
from zerostep.step.late_params import PendingBucket
from zerostep.step.weak import weakly

_log = logging.getLogger(__name__)
# Compilations that begin while parameters are late: some are new shapes or modes, but if they do not end, compiled code
# has guards on late parameters and would be compiled anew in every step.
_MOST_COMPILATIONS = 3
_REASON = 'parameters arrive during the forward pass; for a single graph, build the optimizer with gather="step"'


class PendingGathers:
    """The buckets of one optimizer, any of which may be in flight."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._buckets: dict[int, PendingBucket] = {}
        self._compilations, self._may_be_late = 0, True
        _ALL.add(self)

    def bucket(self, number: int) -> PendingBucket:
        """One bucket; the same object in every step."""
        return self._buckets.setdefault(number, PendingBucket(number, self._timer))

    def add(self, bucket: int, gather: PendingGather) -> None:
        """Keep a launched gather, and with it the memory that it writes, until `wait`."""
        self.bucket(bucket).launched(gather)

    def make_late(self, params: Mapping[int, Sequence[Tensor]]) -> None:
        """Let whoever reads these parameters wait for their bucket; wait now if no parameter may be late."""
        if not self._may_be_late:
            self.wait()
            return
        if _before_compilation not in callback_handler.start_callbacks:  # torch.compiler.reset() removes it
            callback_handler.register_start_callback(_before_compilation)
        for bucket, members in params.items():
            self.bucket(bucket).make_late(members)

    def wait(self) -> None:
        """Return when all buckets are in place."""
        for bucket in list(self._buckets.values()):
            bucket.wait()

    @property
    def error(self) -> BaseException | None:
        """The error of a gather that someone has waited for."""
        return next((bucket.error for bucket in self._buckets.values() if bucket.error is not None), None)

    def recover(self) -> None:
        """Wait for all buckets and forget errors, because all parameters and state are about to be replaced."""
        for bucket in list(self._buckets.values()):
            with suppress(BaseException):  # also a KeyboardInterrupt of an earlier wait
                bucket.wait()
            bucket.forget_error()

    def forbid_late(self, reason: str) -> None:
        """From now on, no parameter is late: `make_late` waits."""
        _log.info("step() waits for new parameters: %s", reason)
        self._may_be_late = False

    def before_compilation(self) -> None:
        """Wait, so that no code is compiled for the class of a late parameter."""
        if any(bucket.is_late for bucket in list(self._buckets.values())):
            self._compilations += 1
            if self._compilations > _MOST_COMPILATIONS:
                self.forbid_late("compiled code reads them before the modules that have them are called")
            self.wait()


_ALL: WeakSet[PendingGathers] = WeakSet()


def _before_compilation(*args: Any) -> None:
    for gathers in list(_ALL):
        gathers.before_compilation()


class ForwardHooks:
    """Hooks that make each module wait for its own parameters; `check` raises if the last step has failed."""

    def __init__(
        self, root: nn.Module, gathers: PendingGathers, bucket_of: Mapping[Tensor, int], check: Callable[[], None]
    ) -> None:
        self._root, self._gathers, self._check = root, gathers, check
        self._own: dict[nn.Module, list[PendingBucket]] = {}
        self.set_buckets(bucket_of)
        # Not traced by torch.compile: it waits between two graphs.
        before = torch._dynamo.disable(weakly(self._before), reason=_REASON)
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                gathers.forbid_late("a script takes no hooks")
            elif module is root or module._parameters:
                # In front of the user's hooks, which may read the parameters.
                module.register_forward_pre_hook(before, prepend=True)

    def set_buckets(self, bucket_of: Mapping[Tensor, int]) -> None:
        """Say which buckets hold the parameters. The hooks stay as they are: compiled code would keep old ones."""
        for module in self._root.modules():
            # Attention reads the parameters of its output projection without calling that module.
            own = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
            buckets = {bucket_of[param] for param in own if param in bucket_of}
            # The order in which `Updater.launch_deferred` launches the gathers.
            self._own[module] = [self._gathers.bucket(bucket) for bucket in sorted(buckets, reverse=True)]

    def _before(self, module: nn.Module, *args: Any) -> None:
        if module is self._root:
            self._check()
        if module is self._root and not module.training:
            # Torch's fast paths for evaluation are not taken if the class of a parameter is not an ordinary one.
            self._gathers.wait()
        for bucket in self._own.get(module, ()):
            bucket.wait()
