"""What users do to gradients between `backward()` and `step()`, done to the parts that this rank owns.

Every method first waits for all sums. All ranks call each of them, in the same order: after every backward call all
ranks have the same gradients, because a parameter that any rank has used has one on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from zerostep.comm.transport import Transport
from zerostep.dtensors import local_of
from zerostep.plan.layout import Fragment
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.grad_sums import GradSums
from zerostep.step.mesh_sums import MeshSums
from zerostep.step.norms import add_up, combine, power_sum, root
from zerostep.step.scaled_sum import multiply


class GradPasses(Protocol):
    """The backward passes of this step, as far as operations on gradients depend on them."""

    def settle(self) -> None:
        """End the passes, and notice gradients that the user has dropped or set by hand; a collective."""

    def finish(self) -> None:
        """Wait for all sums."""

    def joining(self) -> bool:
        """Whether a join context is active."""

    def note_edit(self) -> None:
        """The sums were changed."""

    @property
    def leads(self) -> bool:
        """Whether these are the gradients that all ranks of the optimizer divide."""

    @property
    def several(self) -> bool:
        """Whether the optimizer has further gradients, which fewer ranks divide."""

    def other_gradients(self) -> Sequence[GradChecks]:
        """The gradients that fewer ranks divide."""

    def first_has_gradients(self) -> bool:
        """Whether there are gradients that all ranks divide."""


class GradChecks(Protocol):
    """The gradients of another engine, as far as they count for all."""

    @property
    def mesh_transports(self) -> Sequence[Transport]:
        """How to talk to the ranks that have other elements of the same parameters."""

    def share_of_norm(self, norm_type: float) -> Tensor:
        """What this rank adds to the norm of all."""

    def mark_non_finite(self, found_inf: Tensor) -> None:
        """Set `found_inf`, on this rank, if an owned part has a number that is not finite."""


_OWN_RANKS = (
    "some parameter groups have a process_group of their own, so this rank has not the gradients of all ranks in its "
    "parameters, and torch's clip_grad_norm_() would find another norm on each rank: use the optimizer's own "
    "clip_grad_norm_() and grad_norm()"
)
_NO_SHARED = (
    "GradScaler.unscale_() has found gradients of a group with a process_group of its own and none of any other group, "
    "so that ranks without such gradients would not learn what it finds: train parameters of the other groups, too"
)


class ShardedGradOps:
    """Norms of gradients and changes to them, for a whole model or for a few parameters.

    `passes` is held weakly: it owns this object.
    """

    def __init__(
        self,
        passes: ref[Any],
        buckets: BucketShards,
        sums: GradSums,
        transport: Transport,
        mesh: MeshSums,
        mode: str,
    ) -> None:
        self._passes_ref, self._buckets, self._sums, self._transport = passes, buckets, sums, transport
        self._mesh = mesh
        self._scattered = mode == "scatter"
        self._norms: tuple[float, dict[int, Tensor]] | None = None

    @property
    def _passes(self) -> GradPasses:
        passes: GradPasses | None = self._passes_ref()
        assert passes is not None
        return passes

    # ------------------------------------------------------------------ all gradients

    def total_norm(self, norm_type: float, others: Sequence[GradChecks] = ()) -> Tensor:
        """The norm of all gradients together, the same on all ranks: a number in double precision, on their device.

        `others` are those of the optimizer that fewer ranks divide: what each rank owns of them, no other rank counts.
        """
        if others:
            shares = [each.share_of_norm(norm_type).to(self._device) for each in (self, *others)]
            mine = add_up(torch.stack(shares), norm_type)
            return root(combine(self._buckets.exchanges[0], mine.view(1), norm_type)[0], norm_type)
        if norm_type <= 0:
            # Zeros count: those in a bucket that stand for parameters without a gradient must not.
            norms = self._norms_of(self._settled(), norm_type)
            return torch.linalg.vector_norm(norms, norm_type) if len(norms) else norms.sum()
        return root(self._over_mesh(self._together(self._own_sums(norm_type), norm_type), norm_type), norm_type)

    def share_of_norm(self, norm_type: float) -> Tensor:
        """What this rank adds to the norm of all: the shares of all ranks together count every element once."""
        if norm_type > 0:
            return self._over_mesh(self._own_sums(norm_type), norm_type)
        if norm_type != -math.inf and self._mesh.has_counted:
            raise ValueError(
                f"a norm of order {norm_type} takes each gradient as a whole, and some of a group with a process_group "
                "of its own are DTensors over ranks of the optimizer: use a positive order"
            )
        # Of each whole gradient, as in `total_norm`: all ranks that divide them know these, and one of them counts.
        norms = self._norms_of(self._settled(), norm_type)
        return power_sum([norms] if self._buckets.rank == 0 else [], norm_type, self._device)

    def _own_sums(self, norm_type: float) -> Tensor:
        """What this rank owns, by kind."""
        by_kind = self._parts_by_kind() if self._mesh.divides else [self._all_parts()]
        return torch.stack([power_sum(parts, norm_type, self._device) for parts in by_kind])

    def _over_mesh(self, sums: Tensor, norm_type: float) -> Tensor:
        return add_up(self._mesh.add_up(sums, range(len(sums)), norm_type), norm_type)

    def _norms_of(self, params: Sequence[int], norm_type: float) -> Tensor:
        """The norm of each of some gradients; a collective if it is in parts."""
        sums = [power_sum(self._parts([index]), norm_type, self._device) for index in params]
        if not sums:
            return self._no_norms()
        kinds = [self._mesh.kind_of(index) for index in params]
        return root(self._mesh.add_up(self._together(torch.stack(sums), norm_type), kinds, norm_type), norm_type)

    def _together(self, sums: Tensor, norm_type: float) -> Tensor:
        return combine(self._buckets.exchanges[0], sums, norm_type) if self._scattered else sums

    def _no_norms(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64, device=self._device)

    @property
    def _device(self) -> torch.device:
        """That of the first bucket, over whose exchange the numbers travel."""
        return self._buckets.params[self._buckets.layout.buckets[0].slots[0].param].device

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients."""
        self._note_edit()
        self._settle()
        if self._scattered:
            self._sums.scale(self._sums.used_buckets, factor)
            return
        with torch.no_grad():
            for part in self._parts(self._sums.used):
                multiply(part, factor.to(part.device))

    def clear(self) -> None:
        """Set all sums to zero, which are complete; their parameters still count as used."""
        self._note_edit()
        for part in self._sums.parts.values():
            part.zero_()

    def _note_edit(self) -> None:
        self.drop_norms()
        self._passes.note_edit()

    def drop_norms(self) -> None:
        """Forget norms that were computed before gradients changed."""
        self._norms = None

    def _all_parts(self) -> list[Tensor]:
        self._settle()
        used, parts = self._sums.used, self._sums.parts
        if self._scattered:
            return [parts[bucket] for bucket in self._buckets.buckets_of(list(used))]
        return self._parts(used)

    def _parts_by_kind(self) -> list[list[Tensor]]:
        """The owned parts of all gradients, by the groups over which their elements are spread."""
        parts: list[list[Tensor]] = [[] for _ in range(self._mesh.count)]
        self._settle()
        if not self._scattered:
            for index in sorted(self._sums.used):
                parts[self._mesh.kind_of(index)] += self._parts([index])
            return parts
        for bucket in self._buckets.buckets_of(list(self._sums.used)):
            start = self._buckets.layout.buckets[bucket].owned(self._buckets.rank).start
            for kind, run in self._mesh.runs(self._buckets.layout.fragments_in(bucket, self._buckets.rank)):
                whole = self._sums.parts[bucket]
                parts[kind].append(whole[run[0].place.start - start : run[-1].place.stop - start])
        return parts

    def _settle(self) -> None:
        self._passes.settle()
        self._passes.finish()

    def _settled(self) -> list[int]:
        """The parameters that have a gradient, when all sums are there."""
        self._settle()
        return sorted(self._sums.used)

    # ------------------------------------------------------------------ what torch's functions do to `.grad`

    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        """The norm of each whole gradient; those of all parameters take one exchange."""
        self._refuse_joining()
        if self._passes.several:
            raise RuntimeError(_OWN_RANKS)
        if self._norms is None or self._norms[0] != norm_type:
            used = self._settled()
            found = zip(used, self._norms_of(used, norm_type), strict=True)
            self._norms = norm_type, {index: self._as_norm(index, value) for index, value in found}
        return [self._norms[1][index] for index in params]

    def edit(self, params: Sequence[int], change: Callable[[Tensor], Any]) -> None:
        """Change the owned parts in place, element by element."""
        self._refuse_joining()
        self._passes.finish()
        self._note_edit()
        with torch.no_grad():
            for part in self._parts(params):
                change(part)

    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply by `inverse`, and set `found_inf` on all ranks if any rank finds a number that is not finite."""
        self.edit(params, lambda part: torch._amp_foreach_non_finite_check_and_unscale_([part], found_inf, inverse))
        if self._passes.leads:
            others = self._passes.other_gradients()
            for each in others:
                each.mark_non_finite(found_inf)
            further = [transport for each in others for transport in each.mesh_transports]
            for transport in (self._transport, *self.mesh_transports, *further):
                transport.start_all_reduce(found_inf).wait()
            found_inf.clamp_(max=1.0)
        elif not self._passes.first_has_gradients():
            raise RuntimeError(_NO_SHARED)

    @property
    def mesh_transports(self) -> Sequence[Transport]:
        """How to talk to the ranks that have other elements of the same parameters."""
        return self._mesh.transports

    def mark_non_finite(self, found_inf: Tensor) -> None:
        """Set `found_inf`, on this rank, if an owned part has a number that is not finite."""
        self._passes.finish()
        for part in self._parts(self._sums.used):
            found, one = (torch.full((), value, device=part.device) for value in (0.0, 1.0))
            torch._amp_foreach_non_finite_check_and_unscale_([part], found, one)  # times one: nothing changes
            found_inf.add_(found.to(found_inf.device))

    def _refuse_joining(self) -> None:
        if self._passes.joining() and self._scattered:
            raise RuntimeError(
                "inside Join, ranks without inputs hold gradients too, and cannot follow what is done to .grad: use "
                "the optimizer's own clip_grad_norm_() and grad_norm()"
            )

    def _parts(self, params: Iterable[int]) -> list[Tensor]:
        """The owned parts of some gradients, or all of each where gradients are whole."""
        if not self._scattered:
            whole = [self._buckets.params[index].grad for index in params]
            return [local_of(grad) for grad in whole if grad is not None]
        parts = [self._part(fragment) for index in params for fragment in self._fragments(index)]
        return [part for part in parts if part is not None]

    def _fragments(self, index: int) -> list[Fragment]:
        return [part for part in self._buckets.layout.fragments_of(index) if part.rank == self._buckets.rank]

    def _part(self, fragment: Fragment) -> Tensor | None:
        sums = self._sums.part(fragment.bucket)
        start = self._buckets.layout.buckets[fragment.bucket].owned(self._buckets.rank).start
        return None if sums is None else sums[fragment.place.start - start : fragment.place.stop - start]

    def _as_norm(self, index: int, value: Tensor) -> Tensor:
        param = self._buckets.params[index]
        return value.to(param.device, param.dtype.to_real())
