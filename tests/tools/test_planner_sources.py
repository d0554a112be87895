"""Sources of the planner's parameters: import paths, files and shapes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zerostep.tools.errors import PlanError
from zerostep.tools.planner.sources import load

TENSORS = {
    "embed.weight": torch.zeros(5, 3),
    "layers.0.weight": torch.zeros(3, 3, dtype=torch.bfloat16),
    "layers.0.count": torch.zeros(4, dtype=torch.int64),
}


class OnMeta(nn.Linear):
    """A module that notes where it was built."""

    devices: list[str]

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("table", torch.zeros(6))
        OnMeta.devices = [self.weight.device.type]
        self.bias.requires_grad_(False)


class LooksAtNumbers(nn.Linear):
    """A module that cannot be built without memory."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.scale = self.weight.abs().max().item()


class Fails(nn.Module):
    """A module that cannot be built."""

    def __init__(self) -> None:
        raise RuntimeError("no\nfile")


def needs_arguments(width: int) -> nn.Module:
    return nn.Linear(width, width)


def no_module() -> int:
    return 3


CONSTANT = 3


def test_a_factory_is_run_without_memory() -> None:
    found = load(f"{__name__}:OnMeta")
    assert OnMeta.devices == ["meta"]
    assert [(name, tuple(param.shape), param.requires_grad) for name, param in found.params] == [
        ("weight", (4, 3), True),
        ("bias", (4,), False),
    ]
    assert (found.elements, found.trained_elements, found.buffer_bytes) == (16, 12, 24)
    narrow = load(f"{__name__}:OnMeta", torch.float16)
    assert narrow.buffer_bytes == 12
    assert [param.requires_grad for _, param in narrow.params] == [True, False]


def test_a_factory_that_needs_memory_gets_it() -> None:
    found = load(f"{__name__}:LooksAtNumbers")
    assert found.elements == 16
    assert all(param.is_meta for _, param in found.params)


def test_a_header_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:header])  # not one byte of the tensors
    found = load(str(path))
    assert {name: (tuple(param.shape), param.dtype) for name, param in found.params} == {
        "embed.weight": ((5, 3), torch.float32),
        "layers.0.weight": ((3, 3), torch.bfloat16),
    }
    assert found.buffer_bytes == 32


def test_an_index_names_several_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    places = {name: f"part-{number}.safetensors" for number, name in enumerate(TENSORS)}
    for name, file in places.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert load(str(index)).elements == 24
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(PlanError, match=r"names part-1\.safetensors, which is not beside it"):
        load(str(index))


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"\xff" * 64, (3).to_bytes(8, "little") + b"{}}", (2).to_bytes(8, "little") + b"[]",
     (8).to_bytes(8, "little") + b'{"a": 1}'],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is not a safetensors file") as caught:
        load(str(path))
    assert "\n" not in caught.value.format_message()


@pytest.mark.parametrize(
    ("entry", "excerpt"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "has dtype F4"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 1]}, "has shape"),
        ({"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}, "no parameters"),
    ],
)
def test_tensors_that_cannot_be_trained_are_refused(tmp_path: Path, entry: dict[str, object], excerpt: str) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(PlanError, match=excerpt):
        load(str(path))


@pytest.mark.parametrize(
    ("model", "excerpt"),
    [
        ("gpt5", "is none that is known: give package.module:factory"),
        ("nowhere.safetensors", "is not a file that is there"),
        ("no_such_package:make", "no module named 'no_such_package'"),
        (f"{__name__}:nobody", "check the name behind the colon"),
        (f"{__name__}:", "is not an import path"),
        (f"{__name__}:CONSTANT", "is a int"),
        (f"{__name__}:no_module", "must return a torch.nn.Module"),
        (f"{__name__}:needs_arguments", "must run without arguments"),
        (f"{__name__}:Fails", "fails with RuntimeError: no file"),
    ],
)
def test_errors_say_what_to_do_in_one_line(model: str, excerpt: str) -> None:
    with pytest.raises(PlanError) as caught:
        load(model)
    line = caught.value.format_message()
    assert excerpt in line and "\n" not in line


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for text in ("{}", "[]", "nonsense", '{"weight_map": 3}'):
        path.write_text(text)
        with pytest.raises(PlanError, match="is not an index"):
            load(str(path))
