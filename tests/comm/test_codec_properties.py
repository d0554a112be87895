"""Properties of the codec: any value comes back equal, and any damaged text is a `ValueError`."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zerostep.comm.codec import empty, pack, specs, unpack

patient = settings(deadline=None)

_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(draw(_DTYPES))
    return draw(st.sampled_from([tensor, tensor.movedim(0, -1), tensor[..., ::2]])) if shape else tensor


_PLAIN: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.complex_numbers()
)
_KEYS: st.SearchStrategy[Any] = st.one_of(_PLAIN, st.tuples(st.text(), st.integers()))
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(_PLAIN, _DTYPES, _tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def _same(a: Any, b: Any) -> bool:
    """Equal in type and value; not-a-number equals itself and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return _same(list(a.items()), list(b.items()))
    return repr(a) == repr(b)


def _through(value: Any) -> Any:
    """What another rank would make of the text and of the bytes of the tensors."""
    packed = pack(value)
    copies = [empty(spec, torch.device("cpu")) for spec in specs(packed.text)]
    for copy, tensor in zip(copies, packed.tensors, strict=True):
        copy.copy_(tensor)
    return unpack(packed.text, copies)


@patient
@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert _same(_through(value), value)


@patient
@given(values)
def test_the_text_announces_the_tensors_exactly(value: Any) -> None:
    packed = pack(value)
    announced = specs(packed.text)
    assert [(tuple(spec.shape), spec.stride(), spec.dtype) for spec in announced] == [
        (tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in packed.tensors
    ]
    assert sum(spec.nbytes for spec in announced) == packed.nbytes


@patient
@given(_tensors())
def test_a_dense_tensor_is_not_copied_and_keeps_its_strides(tensor: Tensor) -> None:
    (found,) = pack(tensor).tensors
    if found.stride() == tensor.stride():
        assert found.data_ptr() == tensor.data_ptr()
    else:
        assert found.is_contiguous()


@patient
@given(values, st.sampled_from([{1}, b"x", object(), range(3), print, slice(1), torch.Generator()]), st.data())
def test_a_value_that_cannot_travel_is_refused_wherever_it_stands(
    value: Any, stranger: Any, data: st.DataObject
) -> None:
    nested = data.draw(st.sampled_from([stranger, [value, stranger], (stranger,), {"key": {"in": stranger}}]))
    with pytest.raises(TypeError, match="cannot travel between ranks"):
        pack(nested)


def _read(text: bytes) -> None:
    """Refuse with a `ValueError` or come through; memory is only described, never allocated."""
    try:
        unpack(text, specs(text))
    except ValueError:
        return


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["tensor", "dtype", "complex", "dict", "list", "tuple", "float32", "load", ""]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=12,
)


@settings(patient, max_examples=300)
@given(_JSON, _JSON)
def test_hostile_text_is_a_value_error(head: Any, tree: Any) -> None:
    _read(json.dumps([head, tree]).encode())
    _read(json.dumps([[head], tree]).encode())


@patient
@given(st.binary(max_size=60))
def test_hostile_bytes_are_a_value_error(text: bytes) -> None:
    _read(text)


@patient
@given(values, st.data())
def test_damaged_text_is_a_value_error(value: Any, data: st.DataObject) -> None:
    text = bytearray(pack(value).text)
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    _read(bytes(text))
    _read(bytes(text[:place]))
