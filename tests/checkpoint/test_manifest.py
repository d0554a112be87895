"""The manifest: written and read back equal, and every wrong entry is refused by name."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import Body, signed
from zerostep import CheckpointError, __version__
from zerostep.checkpoint.layouts import LayoutRecord, whole_params
from zerostep.checkpoint.manifest import FileRecord, GroupRecord, Manifest, file_name
from zerostep.plan.layout import Bucket, Layout, ParamSpec, Slot, Span

WHERE = "run/step-7/manifest.json"


def _layout() -> Layout:
    params = (ParamSpec("w", (3, 2), "float32", splittable=True), ParamSpec("none", (0,), "float32"))
    slots = (Slot(0, Span(0, 6)), Slot(1, Span(6, 6), keeper=1))
    return Layout(2, params, (Bucket("float32", "cpu", True, slots, (0, 4, 6)),))


def _manifest(**changes: Any) -> Manifest:
    options = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "rate": torch.tensor([1.5, float("inf")]),
        "none": None,
        "nested": {"a": [1, float("nan")], 2: 1j, "kind": torch.bfloat16},
    }
    found = Manifest(
        id="ab" * 16,
        created=12,
        step=7,
        ranks=2,
        named=True,
        params=whole_params(_layout().params),
        layouts=(LayoutRecord.of_whole(_layout(), {0: (1, 0)}),),
        groups=(GroupRecord(options, (0, 1), "AdamW"),),
        model=(("w", "param", 0), ("tied", "same", "w"), ("mean", "buffer", 1, 2), ("note", "value", {"a": (1,)})),
        extra=({"none": None, "text": "\u00e9\ud800"}, [1, 2]),
        files=tuple(FileRecord(file_name(rank), 100 + rank, f"{rank}f" * 32) for rank in range(2)),
    )
    return replace(found, **changes)


def _body() -> Body:
    body: Body = json.loads(_manifest().encode())["manifest"]
    return body


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = _manifest()
    found = Manifest.decode(manifest.encode(), WHERE)
    assert _same(found, manifest)
    assert found.written_by == __version__
    assert found.encode() == manifest.encode()


def test_the_text_may_be_laid_out_anew_but_not_changed() -> None:
    text = _manifest().encode()
    spaced = json.dumps(json.loads(text), indent=2, sort_keys=True).encode()
    assert _same(Manifest.decode(spaced, WHERE), _manifest())
    with pytest.raises(CheckpointError, match="SHA-256 is not that of its content"):
        Manifest.decode(text.replace(b'"step":7', b'"step":8'), WHERE)


def test_a_tensor_that_is_not_small_is_no_option() -> None:
    manifest = _manifest(groups=(GroupRecord({"lr": torch.zeros(65)}, (0,), "AdamW"),))
    with pytest.raises(TypeError, match=r"shape \(65,\).*up to 64 elements.*keep it in the model"):
        manifest.encode()


def test_another_version_names_who_can_read_it() -> None:
    text = signed(_body() | {"version": 3, "written_by": "9.1", "more": 1})
    with pytest.raises(CheckpointError, match=rf"{WHERE} has format version 3; .*versions up to 2: use zerostep 9.1"):
        Manifest.decode(text, WHERE)


def test_another_format_is_told() -> None:
    with pytest.raises(CheckpointError, match=rf"{WHERE} has the format 'torch', not 'zerostep'.*load another"):
        Manifest.decode(signed({"format": "torch"}), WHERE)


WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "id": (("id",), "xy" * 16, "32 hex digits"),
    "short id": (("id",), "ab", "32 hex digits"),
    "created": (("created",), -1, "a count"),
    "step": (("step",), True, "a count"),
    "named": (("named",), 1, "a bool"),
    "written by": (("written_by",), 1, "a str"),
    "ranks": (("ranks",), -1, "a count"),
    "params": (("params",), {}, "a list"),
    "param": (("params", 0), ["w", [3, 2], "float32"], ""),
    "param's shape": (("params", 0, 1), [2, 3], "a block must lie inside"),
    "param's dtype": (("params", 0, 2), "float31", ""),
    "param's group": (("params", 0, 3), 1, "in group 1, and a layout has it"),
    "one more param": (("params",), [["w", [3, 2], "float32", 0], ["none", [0], "float32", 0]] * 2, "0 blocks do not"),
    "layouts": (("layouts",), [], "no layout"),
    "record": (("layouts", 0), [], "a dict"),
    "record's keys": (("layouts", 0), {"layout": {}, "blocks": []}, "other keys"),
    "layout": (("layouts", 0, "layout"), [], "a dict"),
    "dtype": (("layouts", 0, "layout", "params", 0, 2), "float31", ""),
    "cuts": (("layouts", 0, "layout", "buckets", 0, "cuts"), [0, 7, 6], ""),
    "hole": (("layouts", 0, "layout", "buckets", 0, "params"), [0], "more keepers|exactly one slot"),
    "blocks": (("layouts", 0, "blocks"), [[0, [0, 0]]], "1 blocks stand for 2"),
    "block outside": (("layouts", 0, "blocks", 0), [0, [1, 0]], "must lie inside"),
    "block without offsets": (("layouts", 0, "blocks", 0), [0, [0]], ""),
    "block of nothing": (("layouts", 0, "blocks", 0), [7, [0, 0]], "out of range"),
    "block of another": (("layouts", 0, "blocks", 1), [0, [0, 0]], ""),
    "orders": (("layouts", 0, "orders"), {"0": [0]}, "no order of the dimensions"),
    "order of nothing": (("layouts", 0, "orders"), {"5": [0]}, "out of range"),
    "order by text": (("layouts", 0, "orders"), {"x": [0]}, "invalid literal"),
    "group": (("groups", 0, "params"), [0, 2], "out of range"),
    "options": (("groups", 0, "options"), ["list"], "a dict"),
    "tensor": (("groups", 0, "options"), ["dict", ["lr", ["tensor", "float32", [1 << 50], []]]], "does not have 0"),
    "empty tensor": (("groups", 0, "options"), ["dict", ["lr", ["tensor", "float32", [0, 1 << 70], []]]], ""),
    "class": (("groups", 0, "class"), None, "a str"),
    "kind": (("model", 0, 1), "code", "code"),
    "number": (("model", 0, 2), 2, "out of range"),
    "true number": (("model", 0, 2), True, "does not describe"),
    "same as later": (("model", 0), ["w", "same", "mean"], "mean"),
    "key twice": (("model", 1), ["w", "param", 0], "described twice"),
    "rank": (("model", 2, 2), 2, "stored nowhere"),
    "extra": (("extra",), {}, "a list"),
    "files": (("files",), [], "0 files for 2 ranks"),
    "name": (("files", 1, "name"), "../rank-1.safetensors", "instead of 'rank-1.safetensors'"),
    "bytes": (("files", 0, "bytes"), 1.0, "a count"),
    "sha256": (("files", 0, "sha256"), "AB" * 32, "64 hex digits"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_the_file_and_a_remedy(case: str) -> None:
    keys, value, excerpt = WRONG[case]
    body = _body()
    place: Any = body
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(CheckpointError, match=rf"(?s){WHERE} is damaged: .*({excerpt}).*; load another checkpoint"):
        Manifest.decode(signed(body), WHERE)


@pytest.mark.parametrize("key", list(_body()))
def test_every_key_is_needed_and_no_other_is_known(key: str) -> None:
    body = _body()
    del body[key]
    with pytest.raises(CheckpointError, match=f"damaged.*{key}"):
        Manifest.decode(signed(body), WHERE)
    with pytest.raises(CheckpointError, match=r"other keys.*more"):
        Manifest.decode(signed(_body() | {"more": 1}), WHERE)


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 5000, b'{"manifest":{},"sha256":0}', b"1e999"]
)
def test_any_other_text_is_damaged(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=rf"{WHERE} is damaged: .*; load another checkpoint"):
        Manifest.decode(text, WHERE)
