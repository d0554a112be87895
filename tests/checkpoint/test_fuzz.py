"""Ten thousand mutated manifests and headers: each raises `CheckpointError` or is read correctly, in bounded memory.

Checksums would catch nearly all mutations, so each mutant gets a valid checksum or goes straight to the parser.
"""

import copy
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes
from torch.optim import Muon

import zerostep
from tests.helpers.checkpoints import SMALL_BUCKETS, body_of, joined, signed
from zerostep import CheckpointError, ShardedOptimizer
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.reader import Reader
from zerostep.checkpoint.tensor_file import TensorFile
from zerostep.plan.layout import Span

MANIFESTS, HEADERS, BYTES = 5000, 3500, 1500
EXTREMES: list[Any] = [
    *(0, -1, 1, 2, 1 << 31, 1 << 40, 1 << 63, 1 << 64, -(1 << 63), 10**30),
    *(0.5, 1.0, -0.0, 1e308, float("nan"), float("inf"), True, False, None),
    *(
        "",
        "a",
        "../a",
        "/etc/passwd",
        "rank-0.safetensors",
        "\0",
        "\ud800",
        "x" * 3000,
        "float32",
        "complex32",
        "tensor.0",
    ),
    *([], {}, [[]], [1, 2], ["stored", 0], ["stored", 1 << 50], ["stored", -1], ["tensor", "float32", [1 << 40], []]),
    *(
        ["tensor", "float32", [0, 1 << 62], []],
        ["dict", [["list"], 1]],
        ["float", "inf"],
        ["complex", "a"],
        ["dtype", "x"],
    ),
    *({"a": 1}, [None] * 300, ["list", *[["stored", 0]] * 50]),
]


# A real checkpoint, of two ranks.


class Model(nn.Module):
    """Some parameters in parts, some whole, a tied one, buffers, an odd dtype, and a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 5, bias=False)
        self.tied = self.second
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("odd", torch.ones(2, 3, dtype=torch.complex64))

    def get_extra_state(self) -> Any:
        """Not a tensor."""
        return {"a": (1, 2.5)}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to do."""


def _groups(model: Model) -> list[dict[str, Any]]:
    bias = list(model.first.named_parameters(prefix="first"))[1:]
    norm = list(model.norm.named_parameters(prefix="norm"))
    matrices = [("first.weight", model.first.weight), ("second.weight", model.second.weight)]
    return [{"params": [*bias, *norm]}, {"params": matrices, "optimizer_class": Muon, "lr": torch.tensor(0.5)}]


def _worker(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{root}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = Model()
    optimizer = ShardedOptimizer(model, torch.optim.NAdam, _groups(model), bucket_mb=SMALL_BUCKETS, lr=0.1)
    for param in model.parameters():
        param.sum().backward()
    optimizer.step()
    zerostep.save(Path(root) / "checkpoint", optimizer, model, extra=[rank, {"a": None}])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that is mutated."""
    root = tmp_path_factory.mktemp("fuzz")
    start_processes(_worker, (str(root),), nprocs=2, start_method="forkserver")
    return root / "checkpoint"


# Mutants.


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a tree, with each of its keys."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def _mutate(draw: random.Random, tree: Any) -> None:
    """Change, remove, repeat or exchange entries in some places."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places = list(_places(tree))
        if not places:
            return
        (where, key), (other, its_key) = draw.choice(places), draw.choice(places)
        act = draw.randrange(7)
        if act == 0:
            del where[key]
        elif act == 1 and isinstance(where, list):
            where.append(copy.deepcopy(where[key]))
        elif act == 2:
            where[key] = copy.deepcopy(other[its_key])
        elif act == 3 and type(where[key]) is int:
            where[key] += draw.choice([-1, 1, 2, 1000])
        elif act == 4 and isinstance(where, dict):
            where[draw.choice(["", "a", "0", "1", "99"])] = where.pop(key)
        else:
            where[key] = copy.deepcopy(draw.choice(EXTREMES))


def _garble(draw: random.Random, text: bytes) -> bytes:
    """Change some bytes, or cut."""
    found = bytearray(text)
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(found))
        act = draw.randrange(4)
        if act == 0:
            found[place] ^= 1 << draw.randrange(8)
        elif act == 1:
            found[place] = draw.choice(b'"[]{}:,0123456789eE.-+ \\\x00\xff')
        elif act == 2:
            del found[place : place + draw.choice([1, 2, 20])]
        else:
            found[place:place] = draw.choice([b"[", b"9" * 30, b'"', b"{", b"1e999", b"NaN", b"\\ud800"])
        if not found:
            break
    return bytes(found)


# What is allowed to happen.


@contextmanager
def _bounded(most: int) -> Iterator[None]:
    """Fail if a tensor is made of more bytes than this, or all of them together of twice as many.

    All of a checkpoint's bytes come into memory through `torch.empty`; Python's own objects are as many as the text has
    words, whoever parses it.
    """
    total, make = 0, torch.empty

    def counted(*size: Any, **options: Any) -> Tensor:
        nonlocal total
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        nbytes = math.prod(shape) * options.get("dtype", torch.float32).itemsize
        total += nbytes
        assert nbytes <= most, f"{nbytes} bytes for a file of {most}"
        assert total <= 2 * most, f"{total} bytes in all for a file of {most}"
        return make(*size, **options)

    with mock.patch.object(torch, "empty", counted):
        yield


def _read_everything(reader: Reader) -> int:
    """As one does who wants the whole checkpoint in one piece; how many tensors that are."""
    count = 0
    for number in reader.with_state:
        whole = Span(0, reader.spec(number).numel)
        for key, dtype in reader.per_element_keys(number).items():
            found = reader.elements(number, key, whole)
            assert (found.numel(), found.dtype) == (whole.length, dtype)
            count += 1
        for key in reader.shared_keys(number):
            reader.value(number, key)
        reader.region(number)
    reader.global_state()
    for _, kind, *rest in reader.manifest.model or ():
        if kind == "param":
            whole = Span(0, reader.spec(rest[0]).numel)
            assert reader.weight(rest[0], whole).dtype == reader.weight_dtype(rest[0])
        elif kind == "buffer":
            assert tuple(reader.buffer(*rest).shape) == reader.buffer(rest[0], rest[1], TensorFile.shape)
        count += kind in ("param", "buffer")
    return count


def _outcome(act: Callable[[], object], most: int) -> str:
    try:
        with _bounded(most):
            act()
    except CheckpointError as error:
        assert "load another" in str(error) or "use zerostep" in str(error), error
        assert len(str(error)) < 1000, len(str(error))
        return "refused"
    return "read"


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _tally(draw: Callable[[random.Random], str], count: int) -> dict[str, int]:
    """The outcomes for seeds from 0; a failure names its seed."""
    found = {"refused": 0, "read": 0}
    for seed in range(count):
        try:
            found[draw(random.Random(seed))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return found


def test_the_checkpoint_itself_is_read_whole(checkpoint: Path) -> None:
    with _bounded(_size(checkpoint)):
        assert _read_everything(Reader(checkpoint)) >= 15


def test_mutated_manifests_are_refused_or_make_sense(checkpoint: Path) -> None:
    body, size = json.dumps(body_of(checkpoint)), _size(checkpoint)

    def one(draw: random.Random) -> str:
        mutant = json.loads(body)
        _mutate(draw, mutant)
        return _outcome(lambda: _read_as(mutant), size)

    def _read_as(mutant: Any) -> None:
        manifest = Manifest.decode(signed(mutant), "manifest.json")
        _read_everything(Reader(checkpoint, manifest))

    tally = _tally(one, MANIFESTS)
    assert min(tally.values()) > MANIFESTS // 50, tally  # both happen, or the mutants are too tame or too wild


def test_mutated_headers_are_refused_or_make_sense(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "mutant")
    manifest = Manifest.decode((checkpoint / "manifest.json").read_bytes(), "manifest.json")
    texts = {file.name: (checkpoint / file.name).read_bytes() for file in manifest.files}

    def one(draw: random.Random) -> str:
        name = draw.choice(sorted(texts))
        (tmp_path / "mutant" / name).write_bytes(_mutant(draw, texts[name]))
        found = _outcome(lambda: _read_all(tmp_path / "mutant", manifest), _size(tmp_path / "mutant"))
        (tmp_path / "mutant" / name).write_bytes(texts[name])
        return found

    tally = _tally(one, HEADERS)
    assert min(tally.values()) > HEADERS // 50, tally


def _read_all(path: Path, manifest: Manifest) -> None:
    _read_everything(Reader(path, manifest))


def _mutant(draw: random.Random, text: bytes) -> bytes:
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    about = json.loads(header["__metadata__"]["zerostep"])
    if draw.random() < 0.7:
        _mutate(draw, about)
        header["__metadata__"]["zerostep"] = json.dumps(about)
    else:
        _mutate(draw, header)
    found = joined(json.dumps(header).encode(), text[8 + size :])
    if draw.random() < 0.1:
        length = draw.choice([0, 1, size - 8, size + 8, 1 << 27, 1 << 40, 1 << 63, (1 << 64) - 1])
        found = length.to_bytes(8, "little") + found[8:]
    return found


def test_garbled_bytes_are_refused_or_make_sense(checkpoint: Path, tmp_path: Path) -> None:
    """Bytes of the manifest, as they are and as the text of a signed body; and bytes of a header."""
    raw = (checkpoint / "manifest.json").read_bytes()
    body = json.dumps(body_of(checkpoint)).encode()
    file = (checkpoint / "rank-1.safetensors").read_bytes()
    end = 8 + int.from_bytes(file[:8], "little")

    def one(draw: random.Random) -> str:
        act = draw.randrange(3)
        if act == 0:
            return _outcome(lambda: Manifest.decode(_garble(draw, raw), "manifest.json"), len(raw))
        if act == 1:
            return _outcome(lambda: _decode_signed(_garble(draw, body)), len(body))
        path = tmp_path / "mutant.safetensors"
        path.write_bytes(_garble(draw, file[:end]) + file[end:])
        return _outcome(lambda: TensorFile(path), len(file))

    tally = _tally(one, BYTES)
    assert tally["refused"] > BYTES // 2, tally


def _decode_signed(text: bytes) -> None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = text.decode(errors="replace")
    Manifest.decode(signed(body), "manifest.json")
