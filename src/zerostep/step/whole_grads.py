"""Gradients that every rank has whole: those of `reduction="all"`, and those that a verification brings together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zerostep.dtensors import as_like, local_grad, local_of
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Fragment
from zerostep.step.bucket_shards import BucketShards
from zerostep.tensors import flat_alias


def whole_grad(buckets: BucketShards, sums: Mapping[int, Tensor], index: int) -> Tensor:
    """The whole gradient of a parameter, from the whole sum of its bucket."""
    bucket, span = buckets.layout.place_of(index)
    param, place = buckets.params[index], sums[bucket][span.start : span.stop]
    like = local_of(param)
    return as_like(place.as_strided(like.shape, like.stride(), place.storage_offset()).to(param.dtype), param)


def owned_part(buckets: BucketShards, bucket: int) -> Tensor:
    """The part of a bucket's gradients that this rank owns, copied from whole gradients."""
    where = buckets.layout.buckets[bucket]
    owned, first = where.owned(buckets.rank), buckets.params[where.slots[0].param]
    part = torch.zeros(owned.length, dtype=first.dtype, device=first.device)
    for fragment in buckets.layout.fragments_in(bucket, buckets.rank):
        grad = buckets.params[fragment.param].grad
        if grad is not None:
            place = fragment.place.shift(-owned.start)
            part[place.start : place.stop].copy_(_elements(grad, buckets.params[fragment.param], fragment))
    return part


def present_grads(buckets: BucketShards, used: Iterable[int]) -> dict[int, Tensor]:
    """The whole gradients of some parameters; zeros where there is none."""
    grads = ((index, buckets.params[index]) for index in used)
    return {i: torch.zeros_like(param) if param.grad is None else param.grad.to_dense() for i, param in grads}


def gather_sums(buckets: BucketShards, sums: Mapping[int, Tensor], used: Iterable[int]) -> dict[int, Tensor]:
    """The sums of some parameters, whole, on every rank; a collective, and one that costs an all-gather."""
    whole: dict[int, Tensor] = {}
    used = list(used)
    for bucket in buckets.buckets_of(used):
        where, part = buckets.layout.buckets[bucket], sums[bucket]
        memory = part.new_zeros(padded_size(where))
        owned = where.owned(buckets.rank)
        memory[owned.start : owned.stop].copy_(part)
        buckets.exchange(bucket).gather(memory, where).wait()
        for slot in where.slots:
            like, place = local_of(buckets.params[slot.param]), memory[slot.span.start : slot.span.stop]
            whole[slot.param] = place.as_strided(like.shape, like.stride(), place.storage_offset())
    return {index: whole[index] for index in used}


def _elements(grad: Tensor, param: Tensor, fragment: Fragment) -> Tensor:
    """A fragment of a whole gradient, in the order of the parameter's memory."""
    grad, param = local_grad(grad, param), local_of(param)
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.stride() != param.stride():
        grad = torch.empty_like(param).copy_(grad)
    return flat_alias(grad)[fragment.part.start : fragment.part.stop]
