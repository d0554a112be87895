"""What users do to gradients between `backward()` and `step()`, done to the parts that are kept.

Every method first makes sure that all sums are there. All ranks call each of them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from zerostep.plan.layout import Fragment
from zerostep.step import norms as clipping

if TYPE_CHECKING:
    from zerostep.step.engine import Engine

__all__ = ["ShardedGradOps"]


class ShardedGradOps:
    """Norms of gradients and changes to them, for a whole model or for a few parameters."""

    def __init__(self, engine: Engine) -> None:
        self._of = ref(engine)
        self._norms: tuple[float, dict[int, Tensor]] | None = None

    @property
    def _engine(self) -> Engine:
        found = self._of()
        assert found is not None
        return found

    @property
    def _scattered(self) -> bool:
        return self._engine.settings.reduction == "scatter"

    # ------------------------------------------------------------------ all gradients

    def total_norm(self, norm_type: float) -> float:
        """The norm of all gradients together, the same on all ranks."""
        mine = clipping.power_sum(self._all_parts(), norm_type)
        total = clipping.combine(self._engine.shared, [mine], norm_type)[0] if self._scattered else mine
        return clipping.root(total, norm_type)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self.drop_norms()
        with torch.no_grad():
            for part in self._all_parts():
                part.mul_(factor)

    def clear(self) -> None:
        """Set all gradients to zero; they still count."""
        self.drop_norms()
        for part in self._all_parts():
            part.zero_()

    def drop_norms(self) -> None:
        """The gradients are no longer what they were."""
        self._norms = None

    def _all_parts(self) -> list[Tensor]:
        engine = self._engine
        engine.finish()
        if self._scattered:
            return [engine.reduction.sums[bucket] for bucket in engine.used_buckets()]
        return self._parts(engine.reduction.used)

    # ------------------------------------------------------------------ what comes through `.grad`

    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        """The norm of each whole gradient; those of all are found in one go."""
        used_elsewhere = self._begin()
        if self._norms is None or self._norms[0] != norm_type:
            used = sorted(self._engine.reduction.used)
            sums = [clipping.power_sum(self._parts([index]), norm_type) for index in used]
            self._refuse_late(used_elsewhere)
            totals = clipping.combine(self._engine.shared, sums, norm_type) if self._scattered else sums
            found = {i: self._as_norm(i, clipping.root(x, norm_type)) for i, x in zip(used, totals, strict=True)}
            self._norms = norm_type, found
        return [self._norms[1][index] for index in params]

    def edit(self, params: Sequence[int], change: Callable[[Tensor], Any]) -> None:
        """Change the kept parts in place, element by element."""
        first = not self._engine.passes_ended
        used_elsewhere = self._begin()
        if first:
            self._refuse_late(used_elsewhere)
        self.drop_norms()
        with torch.no_grad():
            for part in self._parts(params):
                change(part)

    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply by `inverse`; all ranks learn whether any has found a number that is not finite."""
        used_elsewhere, first = self._begin(), self._engine.params[params[0]]
        alike = [index for index in used_elsewhere if _kind(self._engine.params[index]) == _kind(first)]
        self.drop_norms()
        for part in self._parts([*params, *alike]):
            torch._amp_foreach_non_finite_check_and_unscale_([part], found_inf, inverse)
        self._engine.ranks.shards.start_all_reduce(found_inf).wait()
        found_inf.clamp_(max=1.0)

    def _begin(self) -> set[int]:
        """The gradients that are known only now: whoever calls has listed all gradients before, and lacks those."""
        before = self._engine.passes_ended
        if self._engine.joining() and self._scattered:
            raise RuntimeError(
                "inside Join, ranks without inputs hold gradients too, and cannot follow what is done to .grad: use "
                "the optimizer's own clip_grad_norm_() and grad_norm()"
            )
        self._engine.finish()
        return set() if before else self._engine.used_elsewhere

    def _refuse_late(self, used_elsewhere: set[int]) -> None:
        """All ranks refuse if one of them has not listed all gradients."""
        if self._scattered and any(
            row[0] for row in self._engine.shared.start_all_gather_ints([len(used_elsewhere)]).wait()
        ):
            raise RuntimeError(
                "ranks have used different parameters in this step, so their lists of gradients differ: use the "
                "optimizer's own clip_grad_norm_() and grad_norm()"
            )

    def _parts(self, params: Iterable[int]) -> list[Tensor]:
        """The kept parts of some gradients, or all of them where gradients are whole."""
        if not self._scattered:
            whole = [self._engine.params[index].grad for index in params]
            return [grad for grad in whole if grad is not None]
        found = [self._part(fragment) for index in params for fragment in self._fragments(index)]
        return [part for part in found if part is not None]

    def _fragments(self, index: int) -> list[Fragment]:
        return [part for part in self._engine.layout.fragments_of(index) if part.rank == self._engine.rank]

    def _part(self, fragment: Fragment) -> Tensor | None:
        sums = self._engine.reduction.sums.get(fragment.bucket)
        start = self._engine.layout.buckets[fragment.bucket].owned(self._engine.rank).start
        return None if sums is None else sums[fragment.place.start - start : fragment.place.stop - start]

    def _as_norm(self, index: int, value: float) -> Tensor:
        param = self._engine.params[index]
        return torch.tensor(value, dtype=param.dtype.to_real(), device=param.device)


def _kind(param: Tensor) -> tuple[torch.dtype, torch.device]:
    return param.dtype, param.device
