"""Parameters whose new values are in flight: whoever reads one waits for them first.

While a bucket is in flight, each of its parameters has a class of its own, derived from the one it had, that waits when
the parameter is used: in a function or method of torch, in an attribute that shows its memory, in a copy. All
parameters of the bucket then get their own classes back. Code of torch.compile has guards on the classes of the
parameters it reads, so that it, too, never runs on a late one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from threading import RLock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerostep.comm.exchange import PendingGather
from zerostep.dtensors import local_of
from zerostep.step.labels import PhaseTimer


def clear_grads(params: Iterable[Tensor]) -> None:
    """Set `.grad` of parameters to `None` without asking their classes, which takes longer for late ones."""
    set_grad = _grad.__set__
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            set_grad(param, None)


class PendingBucket:
    """One bucket of parameters, which may be in flight. Any thread may wait for it.

    Late parameters refer to this object, and nothing here refers to the optimizer: they may outlive it.
    """

    def __init__(self, bucket: int, timer: PhaseTimer) -> None:
        self._bucket, self._timer = bucket, timer
        self._lock = RLock()
        self._gather: PendingGather | None = None
        self._error: BaseException | None = None
        self._late: Sequence[Tensor] = ()
        self._own_classes: Sequence[type[Tensor]] = ()
        self._late_classes: dict[type[Tensor], type[Tensor]] = {}

    @property
    def is_late(self) -> bool:
        """Whether reading a parameter would wait."""
        return bool(self._late)

    @property
    def error(self) -> BaseException | None:
        """The error of the last gather, if it has failed."""
        return self._error

    def launched(self, gather: PendingGather) -> None:
        """Keep a launched gather, and with it the memory that it writes, until `wait`."""
        self._gather, self._error = gather, None

    def make_late(self, params: Sequence[Tensor]) -> None:
        """Let whoever reads these parameters wait. Where a class does not allow that, wait now."""
        if self._gather is None:
            return  # someone has waited already
        self._late, self._own_classes = params, [type(param) for param in params]
        try:
            for own in set(self._own_classes) - self._late_classes.keys():
                self._derive(own)
            for param, own in zip(params, self._own_classes, strict=True):
                param.__class__ = self._late_classes[own]
        except Exception:  # of a metaclass or an `__init_subclass__`, too
            self.wait()

    def wait(self) -> None:
        """Return when the parameters are in place."""
        # Without the lock: `_gather` is reset after everything is in place, and set only inside of a step.
        if self._gather is None and self._error is None:
            return
        with self._lock:
            if self._error is not None:
                raise self._error  # for every reader: the values are those of no step
            gather = self._gather
            if gather is None:
                return
            try:
                with self._timer.waiting("gather", self._bucket):
                    gather.wait()
            except BaseException as error:
                self._error, self._gather = error, None  # still late: whoever reads a parameter gets the error
                raise
            self._end()

    def _end(self) -> None:
        for param, own in zip(self._late, self._own_classes, strict=True):
            param.__class__ = own
        # Emptied, so that parameters and this object do not keep each other alive.
        self._late, self._own_classes = (), ()
        self._gather = None

    def forget_error(self) -> None:
        """A state is loaded: what a failed gather has left is replaced."""
        if self._error is not None:
            self._end()
        self._error = None

    def _derive(self, own: type[Tensor]) -> None:
        make: Any = type(own)  # the metaclass
        bases = (_LateDTensor, own) if issubclass(own, DTensor) else (_Late, own)
        self._late_classes[own] = make(f"Late{own.__name__}", bases, {"__slots__": (), "pending_bucket": self})


class _Late:
    """In front of a parameter's own class while it is in flight."""

    __slots__ = ()
    pending_bucket: ClassVar[PendingBucket]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_NO_VALUES or (func is _tensor.copy_ and _has_failed(args[0])):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
        _wait_for(types)
        return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:
        """As ever, and faster than by `__torch_function__`: `zero_grad()` of a module asks for it twice."""
        with torch._C.DisableTorchFunctionSubclass():
            return _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _grad.__delete__(self)

    def __deepcopy__(self, memo: Any) -> Any:
        self.pending_bucket.wait()
        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.pending_bucket.wait()
        return self.__reduce_ex__(protocol)


class _LateDTensor(_Late):
    """The same for a DTensor, whose memory can be had without a function of torch."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> Any:
        self.pending_bucket.wait()
        return local_of(self)  # type: ignore[arg-type]

    @_local_tensor.setter
    def _local_tensor(self, value: Any) -> None:
        self.pending_bucket.wait()
        self._local_tensor = value  # by its own class


def _has_failed(target: Any) -> bool:
    """Whether a parameter has no values, because its gather has failed: then new ones may be copied into it."""
    return isinstance(target, _Late) and target.pending_bucket.error is not None


@torch._dynamo.disable
def _wait_for(types: Any) -> None:
    for each in types:
        if issubclass(each, _Late):
            each.pending_bucket.wait()


# Used between step() and the next forward pass, and without a look at the values. Short on purpose: functions of torch
# that pass the memory on to C++ without a further question, such as those of torch.distributed, ask for more than this.
_tensor: Any = Tensor
_grad, _requires_grad = _tensor.grad, _tensor.requires_grad
_READS_NO_VALUES = frozenset(
    (
        *(_grad.__get__, _grad.__set__, _grad.__delete__, _requires_grad.__get__, _requires_grad.__set__),
        *(_tensor.shape.__get__, _tensor.dtype.__get__, _tensor.device.__get__, _tensor.is_leaf.__get__),
        _tensor.is_meta.__get__,
        *(_tensor._version.__get__, _tensor.numel, _tensor.requires_grad_),
        *(_tensor.register_hook, _tensor.register_post_accumulate_grad_hook),
    )
)
