"""The value of `.grad` after a gradient was reduced and each rank kept the part it owns.

A `ShardedGradient` has a shape but no memory. The operations of torch's own clipping by norm or by value, of
`GradScaler` and of setting to zero give the right result, because they are done to the owned parts on all ranks. Casts
and moves, which `model.to(...)` makes, do nothing. All others are refused with the reason: a number from one rank's
part would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerostep.step.ddp_hook import in_backward_pass

_REASON = (
    "the gradient of this parameter was summed over the ranks during backward(), and each rank kept only the part it "
    "owns. Use the optimizer's clip_grad_norm_() and grad_norm(), or torch.nn.utils.clip_grad_norm_() and "
    'clip_grad_value_() on all ranks; to read whole gradients, build the optimizer with reduction="all"'
)

_IN_DDP = (
    " inside backward(), as DistributedDataParallel does: if the model is wrapped in it, pass the wrapped model, as in "
    "ddp = DistributedDataParallel(model); optimizer = ShardedOptimizer(ddp, ...)"
)

_ADDED = (
    ". To add to gradients by hand, as zero-bubble schedules of torch.distributed.pipelining do, run all backward "
    "passes of a step inside no_sync()"
)

_aten = torch.ops.aten


class GradOps(Protocol):
    """Operations on the owned parts of gradients."""

    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        """The norm of each whole gradient; a collective."""

    def edit(self, params: Sequence[int], change: Callable[[Tensor], Any]) -> None:
        """Change the owned parts in place, element by element."""

    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply by `inverse`, and set `found_inf` on all ranks if any rank finds a number that is not finite."""


class ShardedGradient(torch.Tensor):
    """A tensor without memory, in place of the gradient of parameter number `param` of `ops`."""

    param: int
    ops: ref[Any]
    arrived: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, param: int, ops: ref[Any]) -> ShardedGradient:
        """A stand-in for the gradient of `like`. `ops` is a weak reference to `GradOps`."""
        make: Any = torch.Tensor._make_wrapper_subclass
        gradient: ShardedGradient = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        gradient.param, gradient.ops, gradient.arrived = param, ops, None
        return gradient

    def __init__(self, like: Tensor, param: int, ops: ref[Any]) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def take_arrived(self) -> Tensor | None:
        """Remove and return the gradient that autograd has added since, if it has. Its memory may be autograd's."""
        arrived, self.arrived = self.arrived, None
        return arrived

    def copy_arrived(self) -> None:
        """Copy the gradient that autograd has added: it is kept beyond the call of a hook."""
        self.arrived = None if self.arrived is None else self.arrived.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for operations from Python; autograd's own additions go to `__torch_dispatch__` directly."""
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if attribute in _CONVERSIONS and (attribute != "type" or len(args) > 1) and not _to_meta(args, kwargs):
            return args[0]
        if func == _set_data and args[0] is args[1]:
            return None
        if attribute not in _ALLOWED:
            raise RuntimeError(f"{_REASON}{_ADDED if attribute in _ADDING else ''} (tried: {attribute or name})")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one of the operations in `_OPERATIONS`; refuse all others."""
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise RuntimeError(f"{_REASON} (tried: {func}{_IN_DDP if in_backward_pass() else ''})")
        return operation(func, args, kwargs or {})


_ADDING = ("add_", "__iadd__", "sub_", "__isub__")

# What Python code may read from a gradient or do to it. Adding is not allowed: it would be taken for autograd's
# accumulation. Norms outside of clipping are not, either: one rank alone that computes one would wait for ever.
_ALLOWED = frozenset(
    """
    shape dtype device layout ndim is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_leaf requires_grad
    grad_fn grad names itemsize nbytes _version output_nr retains_grad __repr__ __str__ __format__ __hash__ __len__
    __dir__ dim size stride numel nelement element_size data_ptr ndimension is_contiguous is_floating_point
    is_complex is_signed get_device storage_offset type requires_grad_ detach detach_ zero_ mul_ __imul__ div_
    __itruediv__ clamp_ clamp_max_ clamp_min_ clip_ linalg_vector_norm _foreach_norm _foreach_mul_ _foreach_div_
    _foreach_clamp_max_ _foreach_clamp_min_ _foreach_zero_ _amp_foreach_non_finite_check_and_unscale_
    """.split()  # noqa: SIM905
) | frozenset(
    # What torch.compile asks when it describes a parameter, and with it the gradient; the last one is nn.Module's
    # question before it sets `.grad.data` to a converted gradient.
    (
        *("_is_view", "is_nested", "is_mkldnn", "is_inference", "is_conj", "is_neg", "untyped_storage"),
        "_has_compatible_shallow_copy_type",
    )
)

# What `nn.Module.to()`, `.float()` and their kind do to gradients, before they set `.grad.data` to the result.
# Without memory there is nothing to convert; the optimizer compares the parameters themselves when it uses them next.
_CONVERSIONS = frozenset("to cpu cuda xpu mtia type float double half bfloat16".split())  # noqa: SIM905
_tensor: Any = Tensor
_set_data = _tensor.data.__set__


def _to_meta(args: Any, kwargs: Any) -> bool:
    """Whether a conversion goes to the meta device, for which `nn.Module` makes new parameters, without gradients."""
    return "meta" in {str(value) for value in (*args[1:], *(kwargs or {}).values()) if not isinstance(value, Tensor)}


def _ops(gradient: ShardedGradient) -> GradOps:
    ops: GradOps | None = gradient.ops()
    if ops is None:
        raise RuntimeError("the optimizer that held this gradient is gone")
    return ops


def _accumulate(func: Any, args: Any, kwargs: Any) -> Tensor:
    gradient, new = args[:2]
    if not isinstance(gradient, ShardedGradient) or isinstance(new, ShardedGradient):
        raise RuntimeError(f"{_REASON} (tried: {func})")
    gradient.arrived = new if gradient.arrived is None else gradient.arrived + new
    return gradient


def _norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    if len(args) > 2 and args[2] is not None:
        raise RuntimeError(f"{_REASON} (tried: {func} along a dimension)")
    return _norms(func, ([args[0]], *args[1:2]), kwargs)[0]


def _norms(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    gradients, norm_type = args[0], float(args[1]) if len(args) > 1 else 2.0
    norms: dict[int, Tensor] = {}
    for ops, positions, part in _by_ops(gradients):
        those = func(part, *args[1:]) if ops is None else ops.norms([each.param for each in part], norm_type)
        norms.update(zip(positions, those, strict=True))
    return [norms[position] for position in range(len(gradients))]


def _by_ops(gradients: Sequence[Any]) -> Iterator[tuple[GradOps | None, list[int], list[Any]]]:
    """The gradients of each optimizer in a list, with their positions; `None` stands for ordinary gradients."""
    all_ops = [_ops(each) if isinstance(each, ShardedGradient) else None for each in gradients]
    for ops in dict.fromkeys(all_ops):  # in list order: some operations are collectives
        positions = [position for position, each in enumerate(all_ops) if each is ops]
        yield ops, positions, [gradients[position] for position in positions]


def _edit(func: Any, args: Any, kwargs: Any) -> Any:
    """An in-place operation on one gradient, or on each gradient in a list."""
    target, *others = args
    several = isinstance(target, (list, tuple))
    foreign = not several and not isinstance(target, ShardedGradient)
    if foreign or any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(others)):
        raise RuntimeError(f"{_REASON} (tried: {func} with {'other tensors' if several else 'another tensor'})")
    for ops, _, part in _by_ops(target if several else [target]):
        if ops is None:
            func(part, *others, **kwargs)
        else:
            ops.edit([each.param for each in part], lambda sums: func([sums] if several else sums, *others, **kwargs))
    return None if several else target


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    gradients, found_inf, inverse = args
    for ops, _, part in _by_ops(gradients):
        if ops is None:
            func(part, found_inf, inverse)
        else:
            ops.unscale([each.param for each in part], found_inf, inverse)


_EDITS = (
    *(_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar, _aten.zero_.default),
    *(_aten.clamp_.default, _aten.clamp_max_.default, _aten.clamp_min_.default, _aten._foreach_zero_.default),
    *(_aten._foreach_mul_.Tensor, _aten._foreach_mul_.Scalar, _aten._foreach_div_.Scalar),
    *(_aten._foreach_clamp_max_.Scalar, _aten._foreach_clamp_min_.Scalar),
)
_OPERATIONS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_EDITS, _edit),
    _aten.add_.Tensor: _accumulate,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.detach.default: lambda func, args, kwargs: args[0],
}
