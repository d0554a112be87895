"""The gradient of a parameter after its elements have gone to their owners.

`.grad` of such a parameter is a `ShardedGradient`: it has a shape but no memory. What users and frameworks do to
gradients between `backward()` and `step()` gives the right answer where it can: torch's own clipping by norm or by
value, `GradScaler`, setting to zero. Everything else is refused with the reason, because a number from one rank's part
would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["GradOps", "ShardedGradient"]

_REASON = (
    "the gradient of this parameter was summed over the ranks during backward(), and each rank kept only the part it "
    "owns. Use the optimizer's clip_grad_norm_() and grad_norm(), or torch.nn.utils.clip_grad_norm_() and "
    'clip_grad_value_() on all ranks; to read whole gradients, build the optimizer with reduction="all"'
)

_aten = torch.ops.aten


class GradOps(Protocol):
    """Who holds the parts that a gradient stands for."""

    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        """The norm of each whole gradient; a collective."""

    def edit(self, params: Sequence[int], change: Callable[[Tensor], Any]) -> None:
        """Change the kept parts in place, element by element."""

    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply by `inverse`, and set `found_inf` on all ranks if any rank finds a number that is not finite."""


class ShardedGradient(torch.Tensor):
    """Stands where a gradient was."""

    param: int
    keeper: ref[Any]
    arrived: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, param: int, keeper: ref[Any]) -> ShardedGradient:
        """A stand-in for the gradient of `like`, which is parameter number `param` of `keeper`."""
        made: Any = torch.Tensor._make_wrapper_subclass
        found: ShardedGradient = made(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        found.param, found.keeper, found.arrived = param, keeper, None
        return found

    def __init__(self, like: Tensor, param: int, keeper: ref[Any]) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def take_arrived(self) -> Tensor | None:
        """The gradient that autograd has added since, if it has."""
        found, self.arrived = self.arrived, None
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for what Python code does; autograd's own additions come to `__torch_dispatch__` directly."""
        name = getattr(func, "__name__", str(func))
        asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if asked not in _HARMLESS:
            raise RuntimeError(f"{_REASON} (tried: {asked or name})")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operations that gradients stand for; the others are refused."""
        known = _KNOWN.get(func)
        if known is None:
            raise RuntimeError(f"{_REASON} (tried: {func})")
        return known(func, args, kwargs or {})


# What Python code may ask of a gradient or do to it. Adding is not among it: it would be taken for autograd that
# accumulates. Nor is a norm outside of clipping: it is mostly asked for by one rank alone, which would wait for ever.
_HARMLESS = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_leaf",
        "requires_grad",
        "grad_fn",
        "grad",
        "names",
        "itemsize",
        "nbytes",
        "_version",
        "output_nr",
        "retains_grad",
        "__repr__",
        "__str__",
        "__format__",
        "__hash__",
        "__len__",
        "__dir__",
        "dim",
        "size",
        "stride",
        "numel",
        "nelement",
        "element_size",
        "data_ptr",
        "ndimension",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "storage_offset",
        "type",
        "requires_grad_",
        "detach",
        "detach_",
        "zero_",
        "mul_",
        "__imul__",
        "div_",
        "__itruediv__",
        "clamp_",
        "clamp_max_",
        "clamp_min_",
        "clip_",
        "linalg_vector_norm",
        "_foreach_norm",
        "_foreach_mul_",
        "_foreach_div_",
        "_foreach_clamp_max_",
        "_foreach_clamp_min_",
        "_foreach_zero_",
        "_amp_foreach_non_finite_check_and_unscale_",
    ]
)


def _keeper(gradient: ShardedGradient) -> GradOps:
    found: GradOps | None = gradient.keeper()
    if found is None:
        raise RuntimeError("the optimizer that held this gradient is gone")
    return found


def _accumulate(func: Any, args: Any, kwargs: Any) -> Tensor:
    gradient, new = args[:2]
    if not isinstance(gradient, ShardedGradient) or isinstance(new, ShardedGradient):
        raise RuntimeError(f"{_REASON} (tried: {func})")
    gradient.arrived = new if gradient.arrived is None else gradient.arrived + new
    return gradient


def _norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    gradient, norm_type = args[0], float(args[1]) if len(args) > 1 else 2.0
    if len(args) > 2 and args[2] is not None:
        raise RuntimeError(f"{_REASON} (tried: {func} along a dimension)")
    return _keeper(gradient).norms([gradient.param], norm_type)[0]


def _norms(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    gradients, norm_type = args[0], float(args[1]) if len(args) > 1 else 2.0
    found: list[Any] = [None] * len(gradients)
    for keeper, places in _by_keeper(gradients):
        part = [gradients[place] for place in places]
        norms = func(part, *args[1:]) if keeper is None else keeper.norms([each.param for each in part], norm_type)
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm
    return found


def _by_keeper(gradients: Sequence[Tensor]) -> list[tuple[GradOps | None, list[int]]]:
    """Gradients of several optimizers, and ordinary ones, may stand in one list."""
    keepers = [_keeper(each) if isinstance(each, ShardedGradient) else None for each in gradients]
    order = list(dict.fromkeys(keepers))
    return [(keeper, [place for place, found in enumerate(keepers) if found is keeper]) for keeper in order]


def _edit(func: Any, args: Any, kwargs: Any) -> Tensor:
    gradient, *others = args
    if not isinstance(gradient, ShardedGradient) or any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(others)):
        raise RuntimeError(f"{_REASON} (tried: {func} with another tensor)")
    _keeper(gradient).edit([gradient.param], lambda part: func(part, *others, **kwargs))
    return gradient


def _edit_all(func: Any, args: Any, kwargs: Any) -> None:
    gradients, *others = args
    if any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(others)):
        raise RuntimeError(f"{_REASON} (tried: {func} with other tensors)")
    for keeper, places in _by_keeper(gradients):
        part = [gradients[place] for place in places]
        if keeper is None:
            func(part, *others, **kwargs)
        else:
            keeper.edit([each.param for each in part], lambda sums: func([sums], *others, **kwargs))


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    gradients, found_inf, inverse = args
    for keeper, places in _by_keeper(gradients):
        part = [gradients[place] for place in places]
        if keeper is None:
            func(part, found_inf, inverse)
        else:
            keeper.unscale([each.param for each in part], found_inf, inverse)


def _same(func: Any, args: Any, kwargs: Any) -> Tensor:
    found: Tensor = args[0]
    return found


_KNOWN: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _aten.add_.Tensor: _accumulate,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _edit,
    _aten.mul_.Scalar: _edit,
    _aten.div_.Tensor: _edit,
    _aten.div_.Scalar: _edit,
    _aten.clamp_.default: _edit,
    _aten.clamp_max_.default: _edit,
    _aten.clamp_min_.default: _edit,
    _aten._foreach_mul_.Tensor: _edit_all,
    _aten._foreach_mul_.Scalar: _edit_all,
    _aten._foreach_div_.Scalar: _edit_all,
    _aten._foreach_clamp_max_.Scalar: _edit_all,
    _aten._foreach_clamp_min_.Scalar: _edit_all,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten._foreach_zero_.default: _edit_all,
    _aten.zero_.default: _edit,
    _aten.detach.default: _same,
}
