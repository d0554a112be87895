"""Flat and scattered bucket memory, and the tensor helpers under them."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerostep.comm.transport import BucketMemory
from zerostep.memory.bucket_memory import FlatBucket, ScatteredBucket, make_bucket_memories
from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.groups import param_specs
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.plan.partition import plan
from zerostep.tensors import Scratch, flat_alias, is_dense


def _image(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 5, generator=generator).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).T, True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (_image(), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3).T, True),
        (torch.zeros(1, 5).T, True),
        (torch.zeros(6)[::2], False),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(4, 4)[:, :2].T, False),
        (torch.zeros(1).expand(3), False),
        (torch.zeros(3, 1).expand(3, 2), False),
        (torch.zeros(4).as_strided((2, 2), (1, 1)), False),
    ],
)
def test_dense_memory_has_no_gaps_and_no_overlaps(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def test_a_flat_alias_is_the_same_memory_in_memory_order() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    alias = flat_alias(matrix)
    assert alias.tolist() == [0, 1, 2, 3, 4, 5]
    assert alias.data_ptr() == matrix.data_ptr() and not alias.requires_grad
    before = matrix._version
    alias[1] = 9
    assert matrix[1, 0] == 9 and matrix._version > before


def test_a_flat_alias_of_a_slice_starts_where_the_slice_does() -> None:
    memory = torch.arange(8.0)
    assert flat_alias(memory[2:].view(3, 2).T).tolist() == [2, 3, 4, 5, 6, 7]


def _params(*tensors: Tensor) -> list[Tensor]:
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def _mixed(seed: int = 0) -> list[Tensor]:
    """A vector, a transposed matrix, an image in channels_last, a scalar, an empty one and one with gaps."""
    generator = torch.Generator().manual_seed(seed)
    matrix, gappy = torch.randn(3, 4, generator=generator).T, torch.randn(8, generator=generator)[::2]
    scalar = torch.randn((), generator=generator)
    return _params(torch.randn(5, generator=generator), matrix, _image(seed), scalar, torch.zeros(0, 2), gappy)


def _lie_side_by_side(params: Sequence[Tensor]) -> bool:
    """Whether parameters fill one stretch of memory, in any order."""
    places = sorted((param.data_ptr(), param.nbytes) for param in params)
    return all(first + size == second for (first, size), (second, _) in pairwise(places))


def _layout(params: Sequence[Tensor], world_size: int) -> Layout:
    return plan(param_specs([{"params": list(params)}]), world_size)


def _copied(params: Sequence[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def _transfer(sender: BucketMemory, receiver: BucketMemory, owner: int) -> None:
    """What a transport does, without a network."""
    for source, target in zip(sender.messages(owner), receiver.messages(owner), strict=True):
        loaded, buffer = source.pack(), target.buffer()
        assert loaded.dim() == buffer.dim() == 1 and loaded.numel() == buffer.numel()
        target.unpack(buffer.copy_(loaded))


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_owner_s_parameters_reach_another_rank(as_views: bool, world_size: int) -> None:
    here, there = _mixed(0), _mixed(1)
    layout, before = _layout(here, world_size), _copied(there)
    (sender,), (receiver,) = make_bucket_memories(layout, here, as_views), make_bucket_memories(layout, there, as_views)
    owners = [layout.owner_of(param) for param in range(len(here))]
    for owner in range(world_size):
        _transfer(sender, receiver, owner)
        for param, mine, old in zip(here, there, before, strict=True):
            sent = owners[next(i for i, each in enumerate(here) if each is param)] <= owner
            assert torch.equal(mine, param if sent else old)


def test_ranks_with_other_memory_formats_understand_each_other() -> None:
    here, there = _params(torch.ones(1), _image()), _params(torch.zeros(1), torch.zeros(2, 3, 4, 5))
    layout = _layout(here, 1)
    _transfer(ScatteredBucket(layout.buckets[0], here), ScatteredBucket(layout.buckets[0], there), 0)
    assert torch.equal(here[1], there[1])


def test_scattered_parameters_stay_where_they_are() -> None:
    params = _mixed()
    before = [(param.data_ptr(), param.stride(), param.untyped_storage().data_ptr()) for param in params]
    values = _copied(params)
    (bucket_memory,) = make_bucket_memories(_layout(params, 2), params, as_views=False)
    _transfer(bucket_memory, bucket_memory, 0)
    assert [(param.data_ptr(), param.stride(), param.untyped_storage().data_ptr()) for param in params] == before
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))


def test_a_large_parameter_is_sent_from_where_it_lies() -> None:
    params = _params(torch.ones(1 << 18), torch.ones(3), torch.ones(4))
    (bucket_memory,) = make_bucket_memories(_layout(params, 1), params, as_views=False)
    found = [
        (message.pack().data_ptr() == params[0].data_ptr(), message.pack().numel())
        for message in bucket_memory.messages(0)
    ]
    assert sorted(found) == [(False, 7), (True, 1 << 18)]


def test_small_parameters_travel_together() -> None:
    params = _params(*[torch.ones(1000) for _ in range(300)])
    (bucket_memory,) = make_bucket_memories(_layout(params, 2), params, as_views=False)
    assert [len(bucket_memory.messages(owner)) for owner in range(2)] == [1, 1]


def test_packs_of_small_parameters_are_bounded() -> None:
    params = _params(*[torch.empty(50_000) for _ in range(100)])
    (bucket_memory,) = make_bucket_memories(_layout(params, 1), params, as_views=False)
    sizes = [message.buffer().numel() * 4 for message in bucket_memory.messages(0)]
    assert sum(sizes) == 100 * 200_000 and max(sizes) <= 4 << 20


def test_a_rank_without_parameters_has_no_pieces() -> None:
    params = _params(torch.ones(3))
    for as_views in (False, True):
        (bucket_memory,) = make_bucket_memories(_layout(params, 3), params, as_views)
        assert [len(bucket_memory.messages(owner)) for owner in range(3)] == [1, 0, 0]


def test_scattered_parameters_are_followed_when_rebound() -> None:
    params = _params(torch.zeros(3), torch.zeros(4))
    (bucket_memory,) = make_bucket_memories(_layout(params, 1), params, as_views=False)
    params[0].data = torch.full((3,), 5.0)
    bucket_memory.attach()
    (message,) = bucket_memory.messages(0)
    assert sorted(message.pack().tolist()) == [0, 0, 0, 0, 5, 5, 5]


def test_flat_parameters_share_memory_and_keep_values_and_strides() -> None:
    params = _mixed()
    dense = [param for param in params if is_dense(param)]
    strides, values = [param.stride() for param in dense], _copied(params)
    make_bucket_memories(_layout(params, 2), params, as_views=True)
    assert _lie_side_by_side([param for param in params if param.numel()])
    assert [param.stride() for param in dense] == strides
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))


def test_flat_parameters_of_one_owner_are_one_piece_without_a_copy() -> None:
    params = _params(torch.ones(3), torch.ones(3))
    (bucket_memory,) = make_bucket_memories(_layout(params, 2), params, as_views=True)
    for owner in range(2):
        (message,) = bucket_memory.messages(owner)
        assert message.pack().data_ptr() == message.buffer().data_ptr() == params[owner].data_ptr()


def test_a_parameter_with_gaps_becomes_contiguous_in_a_flat_parcel() -> None:
    params = _params(torch.arange(6.0)[::2])
    make_bucket_memories(_layout(params, 1), params, as_views=True)
    assert params[0].is_contiguous() and params[0].tolist() == [0, 2, 4]


def test_flat_parameters_are_taken_back_when_rebound() -> None:
    params = _params(torch.zeros(3), torch.zeros(4))
    (bucket_memory,) = make_bucket_memories(_layout(params, 1), params, as_views=True)
    params[1].data = torch.full((4,), 5.0)
    bucket_memory.attach()
    (message,) = bucket_memory.messages(0)
    assert sorted(message.pack().tolist()) == [0, 0, 0, 5, 5, 5, 5]
    assert _lie_side_by_side(params)
    params[1].data.fill_(7)
    assert message.pack().sum() == 28


@pytest.mark.parametrize("as_views", [False, True])
def test_frozen_parameters_are_neither_moved_nor_sent(as_views: bool) -> None:
    params = _params(torch.ones(3), torch.ones(4))
    params[1].requires_grad_(False)
    before = params[1].data_ptr()
    (bucket_memory,) = make_bucket_memories(_layout(params, 1), params, as_views)
    assert params[1].data_ptr() == before
    assert [message.pack().numel() for message in bucket_memory.messages(0)] == [3]


def test_only_empty_parameters_need_no_parcel() -> None:
    params = _params(torch.zeros(0), torch.zeros(2, 0))
    for as_views in (False, True):
        assert make_bucket_memories(_layout(params, 2), params, as_views) == []


def test_one_parcel_for_each_dtype() -> None:
    params = _params(torch.zeros(2), torch.zeros(3, dtype=torch.float16), torch.zeros(4))
    bucket_memories = make_bucket_memories(_layout(params, 1), params, as_views=True)
    assert [[message.pack().dtype for message in bucket_memory.messages(0)] for bucket_memory in bucket_memories] == [
        [torch.float32],
        [torch.float16],
    ]
    assert all(bucket_memory.device == torch.device("cpu") for bucket_memory in bucket_memories)


def test_a_parcel_that_still_fits_is_kept_and_others_are_released() -> None:
    params = _params(torch.zeros(2), torch.full((3,), 5.0, dtype=torch.float16))
    first = make_bucket_memories(_layout(params, 1), params, as_views=True)
    params[1].requires_grad_(False)
    second = make_bucket_memories(_layout(params, 1), params, as_views=True, previous=first)
    assert len(second) == 1 and second[0] is first[0]
    (old,) = first[1].messages(0)
    assert params[1].data_ptr() != old.pack().data_ptr() and params[1].tolist() == [5, 5, 5]


def test_a_parameter_thawed_again_moves_back_with_its_values() -> None:
    params = _params(torch.zeros(2), torch.ones(3))
    bucket_memories = make_bucket_memories(_layout(params, 1), params, as_views=True)
    for trainable in (False, True):
        params[1].requires_grad_(trainable)
        bucket_memories = make_bucket_memories(_layout(params, 1), params, True, bucket_memories)
        with torch.no_grad():
            params[1].add_(1)
        assert _lie_side_by_side(params) is trainable
    assert params[1].tolist() == [3, 3, 3]


def test_flat_parcels_know_their_own_parameters_by_identity() -> None:
    params = _params(torch.zeros(2), torch.zeros(2))
    bucket_memory = FlatBucket(_layout(params, 1).buckets[0], params)
    assert bucket_memory.holds(params)
    assert not bucket_memory.holds(copy.deepcopy(params))
    assert not bucket_memory.holds(params[::-1])
    assert not bucket_memory.holds(params[:1])


@pytest.mark.parametrize("splittable", [False, True])
def test_flat_parameters_lie_where_fast_kernels_like_them(splittable: bool) -> None:
    """Between others of odd sizes, in the order that buckets have."""
    sizes = [3, 8, 5, 4, 1, 16]
    specs = [ParamSpec(f"p{i}", (size,), "float32", splittable=splittable) for i, size in enumerate(sizes)]
    layout = plan_buckets(specs, 1, 1 << 20, [4] * 6, [Cost(size) for size in sizes])
    params = _params(*[torch.zeros(size) for size in sizes])
    bucket_memories = make_bucket_memories(layout, params, as_views=True)
    assert len(bucket_memories) == (1 if splittable else 2)
    assert [params[index].data_ptr() % 16 for index in (1, 3, 5)] == [0, 0, 0]


# Host memory that is used again.


def test_scratch_is_never_lent_twice() -> None:
    scratch = Scratch()
    lent = [scratch.allocate(100, torch.float32) for _ in range(5)]
    scratch.free(lent.pop(2))
    lent += [scratch.allocate(100, torch.float32) for _ in range(3)]
    for number, memory in enumerate(lent):
        memory.fill_(number)
    assert all(torch.equal(memory, torch.full((100,), float(number))) for number, memory in enumerate(lent))


def test_scratch_that_was_given_back_is_lent_again_whatever_its_dtype() -> None:
    scratch = Scratch()
    first = scratch.allocate(100, torch.float32)
    scratch.free(first)
    again = scratch.allocate(180, torch.bfloat16)
    assert (again.data_ptr(), again.shape, again.dtype) == (first.data_ptr(), (180,), torch.bfloat16)
    scratch.free(again)
    assert scratch.allocate(100, torch.float32).data_ptr() == first.data_ptr()


def test_scratch_is_taken_where_it_fits_best() -> None:
    scratch = Scratch()
    lent = {size: scratch.allocate(size, torch.float32) for size in (150, 110, 90)}
    for memory in lent.values():
        scratch.free(memory)
    assert [scratch.allocate(100, torch.float32).data_ptr() for _ in range(2)] == [
        lent[110].data_ptr(),
        lent[150].data_ptr(),
    ]
    assert scratch.allocate(100, torch.float32).data_ptr() != lent[90].data_ptr()


def test_little_is_not_taken_from_much() -> None:
    scratch = Scratch()
    much = scratch.allocate(1000, torch.float32)
    scratch.free(much)
    assert scratch.allocate(100, torch.float32).data_ptr() != much.data_ptr()
    assert scratch.allocate(1000, torch.float32).data_ptr() == much.data_ptr()


def test_scratch_does_not_take_what_it_has_not_lent() -> None:
    scratch = Scratch()
    foreign, own = torch.zeros(100), scratch.allocate(100, torch.float32)
    scratch.free(foreign)
    scratch.free(own)
    scratch.free(own)
    found = {scratch.allocate(100, torch.float32).data_ptr()} | {scratch.allocate(100, torch.float32).data_ptr()}
    assert own.data_ptr() in found and foreign.data_ptr() not in found and len(found) == 2


@pytest.mark.parametrize("how", ["trimmed", "let go"])
def test_scratch_that_nobody_has_can_be_freed(how: str) -> None:
    scratch = Scratch()
    memory = scratch.allocate(100, torch.float32)
    storage = StorageWeakRef(memory.untyped_storage())
    if how == "trimmed":
        scratch.free(memory)
    del memory
    scratch.trim()
    assert storage.expired()
