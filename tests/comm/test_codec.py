"""The codec: values as JSON text and tensors, and what it refuses."""

import enum
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from zerostep.comm.codec import pack, specs, unpack

_Pair = namedtuple("_Pair", "first second")


class _Marked(torch.Tensor):
    pass


class _Colour(enum.Enum):
    RED = 1


def _through(value: Any) -> Any:
    packed = pack(value)
    return unpack(packed.text, packed.tensors)


def test_a_state_dict_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found, expected = _through(optimizer.state_dict()), optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert isinstance(found["param_groups"][0]["betas"], tuple)
    assert list(found["state"]) == [0, 1]
    assert torch.equal(found["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])


@pytest.mark.parametrize("value", [float("inf"), -0.0, 10**40, "\x00é", 1 + 2j, (), {}, [], {(1, "a"): None}, True, 1])
def test_plain_values_come_back(value: Any) -> None:
    assert repr(_through(value)) == repr(value)


def test_keys_keep_their_type() -> None:
    assert list(map(repr, _through({1: "a", "1": "b", None: "c", 2.5: "d"}))) == ["1", "'1'", "None", "2.5"]


def test_a_mapping_comes_back_as_a_dict() -> None:
    assert type(_through(OrderedDict(a=1))) is dict


def test_a_parameter_travels_as_its_values() -> None:
    found = _through([torch.nn.Parameter(torch.ones(2))])[0]
    assert type(found) is torch.Tensor and not found.requires_grad


def test_conjugate_and_negative_views_travel_as_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    found = _through([value, value.imag])
    assert torch.equal(found[0], value) and torch.equal(found[1], value.imag)
    assert not found[0].is_conj() and not found[1].is_neg()


def test_channels_last_keeps_its_memory_order() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    packed = pack(image)
    assert packed.tensors[0].data_ptr() == image.data_ptr()
    assert specs(packed.text)[0].stride() == image.stride()


def test_memory_with_gaps_is_packed_first() -> None:
    gappy = torch.arange(6.0)[::2]
    (spec,) = specs(pack(gappy).text)
    assert (spec.shape, spec.stride(), spec.dtype) == ((3,), (1,), torch.float32)
    assert spec.nbytes == 12
    assert torch.equal(_through(gappy), gappy)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"value\['a'\]\[1\] is a builtins.set, which cannot travel between ranks"),
        ({b"k": 1}, r"value key b'k' is a builtins.bytes"),
        (_Pair(1, 2), "_Pair, which cannot travel"),
        (_Colour.RED, "_Colour, which cannot travel"),
        ((len,), r"value\[0\] is a builtins.builtin_function_or_method"),
        ([torch.ones(2).to_sparse()], r"value\[0\] is a .* with layout torch.sparse_coo"),
        (torch.ones(2).as_subclass(_Marked), "only dense tensors without a subclass can; convert it first"),
    ],
)
def test_the_first_value_that_cannot_travel_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(value)


def test_the_refusal_says_what_can_travel() -> None:
    with pytest.raises(TypeError, match="numbers, text, None, lists, tuples, dicts and tensors can; convert it"):
        pack(object())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"7",
        b"[]",
        b"[[]]",
        b"[{},0]",
        b"[" * 100_000,
        b"[[],1" + b"0" * 5000 + b"]",
        b"[[1],0]",
        b"[[[1]],0]",
        b'[[[2,1,"float32"]],0]',
        b'[[[[2],[1],"load"]],0]',
        b"[[[[2],[1],7]],0]",
        b'[[[["a"],[1],"float32"]],0]',
        b'[[[[2.0],[1],"float32"]],0]',
        b'[[[[-1],[1],"float32"]],0]',
        b'[[[[2],[-1],"float32"]],0]',
        b'[[[[2],[2],"float32"]],0]',
        b'[[[[2,2],[1,1],"float32"]],0]',
        b'[[[[2],[1,1],"float32"]],0]',
        b'[[[[2],[1],"quint8"]],0]',
        b'[[[[9223372036854775807,9223372036854775807],[1,1],"float32"]],0]',
        b'[[[[99999999999999999999999],[1],"float32"]],0]',
    ],
)
def test_a_malformed_head_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        specs(text)


@pytest.mark.parametrize(
    "tree",
    [
        b"[]",
        b'["tensor"]',
        b'["tensor",1]',
        b'["tensor",-1]',
        b'["tensor","a"]',
        b'["tensor",[]]',
        b'["dtype"]',
        b'["dtype",1]',
        b'["dtype","load"]',
        b'["complex","a"]',
        b'["complex",1,2,3]',
        b'["dict",1]',
        b'["dict",[["list"],1]]',
        b'["what"]',
        b'[["list"]]',
        b"[7,1]",
    ],
)
def test_a_malformed_tree_is_refused(tree: bytes) -> None:
    head = b'[[[2],[1],"float32"]]'
    with pytest.raises(ValueError):
        unpack(b"[" + head + b"," + tree + b"]", [torch.zeros(2)])


def test_missing_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="the text speaks of 1 tensors, 0 came with it"):
        unpack(pack(torch.ones(1)).text, [])
