"""`consolidate` and `reshard` on synthetic checkpoints: the files, the refusals, and the memory they need."""

import errno
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.synthetic_checkpoint import Made, bits, flat
from zerostep import CheckpointError, consolidate
from zerostep.checkpoint import export, pt_file
from zerostep.checkpoint import stored_tensor as stored
from zerostep.checkpoint.manifest import GroupRecord
from zerostep.checkpoint.reshard import reshard
from zerostep.plan.layout import ParamSpec
from zerostep.plan.partition import plan
from zerostep.state.param_state import order_of

MIB = 1 << 20


def _specs(*shapes: tuple[int, ...], dtype: str = "float32") -> list[ParamSpec]:
    return [ParamSpec(f"layer.{n}", shape, dtype, splittable=True) for n, shape in enumerate(shapes)]


def _made(**fields: Any) -> Made:
    """Two parameters on two ranks, with weights that are tied, a buffer, and nothing that is not a tensor."""
    layout = plan(_specs((4, 3, 2, 2), (5,)), 2)
    sizes = [48, 5]
    defaults: dict[str, Any] = {
        "layout": layout,
        "like": {n: {"exp_avg": flat(size, torch.float32, n)} for n, size in enumerate(sizes)},
        "rest": {n: {"step": torch.tensor(3.0)} for n in range(2)},
        "weights": {n: flat(size, torch.float32, n + 7) for n, size in enumerate(sizes)},
        "buffers": {3: (1, torch.arange(3))},
        "model": [("a", "param", 0), ("b", "param", 1), ("also a", "same", "a"), ("count", "buffer", 1, 3)],
        "orders": {0: (0, 2, 3, 1)},
    }
    return Made(**{**defaults, **fields})


def _names(root: Path) -> set[str]:
    return set(os.listdir(root))


# The files.


def test_tensors_keep_the_strides_of_their_parameters(tmp_path: Path) -> None:
    consolidate(_made().write(tmp_path / "c"), tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["state"]
    assert state[0]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert not state[0]["exp_avg"].is_contiguous()


@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (4, 3, 2, 1), (4, 3, 1, 2), (4, 3, 2, 2, 1)], ids=str)
def test_dimensions_of_one_have_the_strides_that_torch_gives_them(shape: tuple[int, ...]) -> None:
    format_ = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    wanted = torch.empty(shape).to(memory_format=format_)
    assert stored._strides(shape, order_of(wanted)) == wanted.stride()


@pytest.mark.parametrize("large", [False, True], ids=["", "zip64"])
def test_a_pt_file_is_a_sound_archive_that_can_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(pt_file, "_ZIP64_FROM", 0 if large else 1 << 31)
    consolidate(_made().write(tmp_path / "c"), tmp_path / "out.pt")
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    read = torch.load(tmp_path / "out.pt", weights_only=True)["state"]
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)["state"]
    for number in range(2):
        assert mapped[number]["exp_avg"].data_ptr() % 64 == 0
        assert bits(mapped[number]["exp_avg"]) == bits(read[number]["exp_avg"])


def test_options_that_are_tensors(tmp_path: Path) -> None:
    groups = [GroupRecord({"lr": torch.tensor(0.25), "betas": (0.9, 0.99), "kind": torch.bfloat16}, (0, 1), "AdamW")]
    consolidate(_made(groups=groups).write(tmp_path / "c"), tmp_path / "out.pt")
    (group,) = torch.load(tmp_path / "out.pt", weights_only=True)["param_groups"]
    assert list(group) == ["param_names", "lr", "betas", "kind", "params"]
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert (group["betas"], group["kind"]) == ((0.9, 0.99), torch.bfloat16)
    assert (group["param_names"], group["params"]) == (["layer.0", "layer.1"], [0, 1])


def test_names_that_nobody_gave_are_left_out(tmp_path: Path) -> None:
    consolidate(_made(named=False).write(tmp_path / "c"), tmp_path / "out.pt")
    (group,) = torch.load(tmp_path / "out.pt", weights_only=True)["param_groups"]
    assert "param_names" not in group


def test_a_parameter_listed_twice_has_a_name_at_each_place(tmp_path: Path) -> None:
    groups = [GroupRecord({}, (0, 0), "AdamW")]
    consolidate(_made(groups=groups).write(tmp_path / "c"), tmp_path / "out.pt")
    (group,) = torch.load(tmp_path / "out.pt", weights_only=True)["param_groups"]
    assert (group["param_names"], group["params"]) == (["layer.0", "layer.1"], [0, 0])


def test_masters_only_on_request(tmp_path: Path) -> None:
    like = {0: {"exp_avg": flat(48, torch.float32, 0), "master": flat(48, torch.float32, 1)}}
    path = _made(like=like).write(tmp_path / "c")
    consolidate(path, tmp_path / "plain.pt")
    consolidate(path, tmp_path / "full.pt", masters=True)
    assert list(torch.load(tmp_path / "plain.pt", weights_only=True)["state"][0]) == ["step", "exp_avg"]
    assert list(torch.load(tmp_path / "full.pt", weights_only=True)["state"][0]) == ["step", "exp_avg", "master"]


@pytest.mark.parametrize("chunk", [16, 4 * MIB])
def test_weights_as_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(stored, "_CHUNK", chunk)
    path = _made().write(tmp_path / "c")
    consolidate(path, tmp_path / "model.safetensors", part="model")
    consolidate(path, tmp_path / "model.pt", part="model")
    found, wanted = load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt", weights_only=True)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "also a": "a"}
    assert set(found) == {"a", "b", "count"}
    assert not wanted["a"].is_contiguous()
    for key, value in found.items():
        assert value.is_contiguous()
        assert value.dtype == wanted[key].dtype
        assert bits(value) == bits(wanted[key])


# What is refused, and leaves nothing behind.


def test_an_existing_file_stays(tmp_path: Path) -> None:
    path = _made().write(tmp_path / "c")
    (tmp_path / "out.pt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already: choose another name"):
        consolidate(path, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="exists already"):
        reshard(path, path, 2)


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: Any) -> None:
        (tmp_path / "out.pt").write_text("mine")

    monkeypatch.setattr(export, "write_pt", late)
    with pytest.raises(CheckpointError, match="exists already"):
        consolidate(_made().write(tmp_path / "c"), tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_text() == "mine"
    assert _names(tmp_path) == {"c", "out.pt"}


@pytest.mark.parametrize("links", [True, False])
def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def no_link(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    consolidate(_made().write(tmp_path / "c"), tmp_path / "out.pt")
    assert _names(tmp_path) == {"c", "out.pt"}
    assert len(torch.load(tmp_path / "out.pt", weights_only=True)["state"]) == 2


@pytest.mark.parametrize("what", ["consolidate", "reshard"])
def test_damage_is_found_first(tmp_path: Path, what: str) -> None:
    path = _made().write(tmp_path / "c")
    file = path / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is damaged.*load another checkpoint"):
        _do(what, path, tmp_path)
    assert _names(tmp_path) == {"c"}


def _do(what: str, path: Path, root: Path) -> None:
    consolidate(path, root / "out.pt") if what == "consolidate" else reshard(path, root / "out", 3)


@pytest.mark.parametrize("what", ["consolidate", "reshard"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=["full", "stopped"]
)
def test_a_failure_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: BaseException
) -> None:
    def fail(tensor: stored.StoredTensor) -> Any:
        assert len(_names(tmp_path)) == 2, "nothing was begun"
        raise error

    path = _made().write(tmp_path / "c")
    monkeypatch.setattr(stored.StoredTensor, "chunks", fail)
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="could not be written.*make room" if expected is CheckpointError else None):
        _do(what, path, tmp_path)
    assert _names(tmp_path) == {"c"}


def test_wrong_arguments(tmp_path: Path) -> None:
    path = _made(model=None).write(tmp_path / "c")
    with pytest.raises(ValueError, match="part must be 'optimizer' or 'model', got 'weights'"):
        consolidate(path, tmp_path / "out.pt", part="weights")
    with pytest.raises(CheckpointError, match=r"must end in \.pt for part='optimizer'"):
        consolidate(path, tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match="saved without model="):
        consolidate(path, tmp_path / "out.pt", part="model")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        consolidate(tmp_path, tmp_path / "out.pt")
    with pytest.raises(ValueError, match="at least 1; got 0"):
        reshard(path, tmp_path / "out", 0)
    with pytest.raises(CheckpointError, match="begins with a dot"):
        reshard(path, tmp_path / ".out", 2)
    assert _names(tmp_path) == {"c"}


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn"])
def test_what_safetensors_cannot_hold(tmp_path: Path, dtype: str) -> None:
    weight = flat(4, getattr(torch, dtype), 1)
    made = Made(plan(_specs((4,), dtype=dtype), 1), {}, weights={0: weight}, model=[("a", "param", 0)])
    path = made.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"'a' has the dtype torch.{dtype}.*export to .pt"):
        consolidate(path, tmp_path / "out.safetensors", part="model")
    consolidate(path, tmp_path / "out.pt", part="model")
    found: Tensor = torch.load(tmp_path / "out.pt", weights_only=True)["a"]
    assert found.dtype == weight.dtype
    assert found.view(torch.uint8).tolist() == weight.view(torch.uint8).tolist()


def test_values_are_not_for_safetensors(tmp_path: Path) -> None:
    path = _made(model=[("a", "param", 0), ("state", "value", {"x": 1})], buffers={}).write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"'state' is a dict.*export to \.pt"):
        consolidate(path, tmp_path / "out.safetensors", part="model")
    assert _names(tmp_path) == {"c"}


# The unsharded optimizer's own file.


def test_the_file_of_torch_save_has_the_same_values(tmp_path: Path) -> None:
    """What plain torch writes and what we write load as equals: keys in order, types, strides."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = torch.optim.AdamW(list(model.named_parameters()), lr=0.5)
    model(torch.ones(1, 3, 2, 2)).sum().backward()
    plain.step()
    torch.save(plain.state_dict(), tmp_path / "torch.pt")
    params = [param for _, param in model.named_parameters()]
    specs = [ParamSpec(name, tuple(p.shape), "float32", splittable=True) for name, p in model.named_parameters()]
    like = {n: {k: _flat(plain.state[p][k]) for k in ("exp_avg", "exp_avg_sq")} for n, p in enumerate(params)}
    options = {k: v for k, v in plain.param_groups[0].items() if k not in ("params", "param_names")}
    made = Made(
        plan(specs, 3),
        like,
        {n: {"step": plain.state[p]["step"]} for n, p in enumerate(params)},
        groups=[GroupRecord(options, tuple(range(4)), "AdamW")],
        orders={n: order_of(p) for n, p in enumerate(params) if not p.is_contiguous()},
    )
    consolidate(made.write(tmp_path / "c"), tmp_path / "ours.pt")
    ours, theirs = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ours", "torch"))
    assert repr(ours) == repr(theirs)
    for number, entry in theirs["state"].items():
        assert [value.stride() for value in ours["state"][number].values()] == [v.stride() for v in entry.values()]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


# Memory.

_MEASURE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import zerostep
from zerostep.checkpoint.reshard import reshard

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

small, large, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def work(path):
    if what == "reshard":
        reshard(path, path.with_name(path.name + "-3"), 3)
    elif what == "optimizer":
        zerostep.consolidate(path, path.with_suffix(".pt"))
    else:
        zerostep.consolidate(path, path.with_suffix(".safetensors"), part="model")

work(small)  # what is loaded only now is no part of the state
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
work(large)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["optimizer", "model", "reshard"])
def test_memory_of_one_parameter(tmp_path: Path, what: str) -> None:
    """200 MB, of which never more than one parameter and a few chunks are in memory."""
    shapes = {"small": (8, 4), "large": (2560, 1024)}  # the large ones have 10 MiB each
    for name, shape in shapes.items():
        layout = plan(_specs(*[shape] * (20 if what == "model" else 7)), 2)
        numbers = range(len(layout.params))
        same = flat(layout.params[0].numel, torch.float32, 0)
        like = {n: {"exp_avg": same, "exp_avg_sq": same, "max": same} for n in numbers} if what != "model" else {}
        Made(
            layout,
            like,
            weights=dict.fromkeys(numbers, same) if what == "model" else {},
            model=[(f"w{n}", "param", n) for n in numbers] if what == "model" else None,
            orders=dict.fromkeys(numbers, (1, 0)),
        ).write(tmp_path / name)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 10 * MIB + 32 * MIB
