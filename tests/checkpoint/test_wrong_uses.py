"""Wrong arguments to `save` and `load` are refused on every rank and change nothing."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

import zerostep
from tests.helpers.checkpoint_setups import SETUPS, Setup, same_weights, save_extra, weights, whole
from tests.helpers.pool import Pool
from tests.helpers.reference import OUTPUTS, assert_same_state_dict, build
from zerostep import CheckpointError


@dataclass(frozen=True)
class Wrong:
    """What somebody does, with a checkpoint of `SETUPS["adamw"]` at `path`, and what he is told."""

    act: Callable[[ProcessGroup, Path], Any]
    kind: type[Exception]
    text: str


def _into(
    setup: Setup, with_model: bool = True, way: str = "auto", **options: Any
) -> Callable[[ProcessGroup, Path], Any]:
    def act(group: ProcessGroup, path: Path) -> None:
        pair = setup.make(group, way, seed=1, **options)
        before = weights(pair[0]), whole(pair[1])
        try:
            zerostep.load(path, pair[1], pair[0] if with_model else None)
        finally:
            same_weights(weights(pair[0]), before[0])
            assert_same_state_dict(whole(pair[1]), before[1])

    return act


def _saving(way: str = "auto", name: str | None = None, **options: Any) -> Callable[[ProcessGroup, Path], Any]:
    def act(group: ProcessGroup, path: Path) -> None:
        pair = SETUPS["adamw"].make(group, way)
        zerostep.save(path if name is None else path.parent / name, pair[1], **options)

    return act


def _no_weights(group: ProcessGroup, path: Path) -> None:
    pair = SETUPS["adamw"].make(group, "auto")
    zerostep.save(path.parent / "bare", pair[1])
    zerostep.load(path.parent / "bare", *reversed(pair))


def _wide(seed: int) -> nn.Module:
    model = build("mlp", seed)
    model.last = nn.Linear(5, OUTPUTS + 1)
    return model


def _longer(seed: int) -> nn.Module:
    model = build("mlp", seed)
    model.more = nn.Linear(1, 1)
    return model


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:]}]


def _shapes_by_position(model: nn.Module) -> list[Tensor]:
    return list(reversed(list(model.parameters())))


WRONG = {
    "the path exists": Wrong(
        _saving(), CheckpointError, r"/it exists already: give each checkpoint a name of its own, such as step-1200"
    ),
    "the path exists, in the background": Wrong(_saving(wait=False), CheckpointError, r"/it exists already"),
    "keep=1": Wrong(
        _saving(name="new", keep=1), ValueError, r"keep must be at least 2, or None to remove nothing; got 1"
    ),
    "keep='2'": Wrong(_saving(name="new", keep="2"), ValueError, r"keep must be at least 2, .*; got '2'"),
    "a hidden name": Wrong(
        _saving(name=".new"),
        CheckpointError,
        r"'\.new' begins with a dot, as unfinished checkpoints do: choose another name",
    ),
    "extra is no plain value": Wrong(
        _saving(name="new", extra={"x": object()}), TypeError, r"extra\['x'\] is a builtins.object, which cannot travel"
    ),
    "an optimizer that is not ours": Wrong(
        lambda group, path: zerostep.save(path.parent / "new", AdamW(build().parameters())),
        TypeError,
        r"a AdamW has no shards to save or load: pass a zerostep.ShardedOptimizer or a zerostep.ZeroRedundancy",
    ),
    "loading into one that is not ours": Wrong(
        lambda group, path: zerostep.load(path, AdamW(build().parameters())),
        TypeError,
        r"a AdamW has no shards to save or load",
    ),
    "no checkpoint": Wrong(
        lambda group, path: _into(SETUPS["adamw"])(group, path / "none"),
        CheckpointError,
        r"none is not a checkpoint: .* cannot be read, No such file or directory; load another .*, see zerostep.latest",
    ),
    "the root": Wrong(
        lambda group, path: _into(SETUPS["adamw"])(group, path.parent),
        CheckpointError,
        r"is not a checkpoint: .*; in it there are it, see zerostep.latest\(\)",
    ),
    "other shapes": Wrong(
        _into(Setup(build=_wide)),
        CheckpointError,
        r"parameter 'last\.weight' has shape \(4, 5\), 'last\.weight' in the checkpoint has \(3, 5\): build the same",
    ),
    "other shapes by position": Wrong(
        _into(Setup(params=_shapes_by_position)),
        CheckpointError,
        r"parameter 'param\.0' has shape \(3,\), 'words\.weight' in the checkpoint has \(13, 7\)",
    ),
    "more parameters": Wrong(
        _into(Setup(build=_longer)),
        CheckpointError,
        r"the checkpoint lacks parameter 'more\.bias', unlike the optimizer: build the same model",
    ),
    "fewer parameters": Wrong(
        _into(Setup(params=lambda model: list(model.named_parameters())[1:])),
        CheckpointError,
        r"the checkpoint has parameter 'words\.weight', unlike the optimizer: build the same model",
    ),
    "fewer parameters without names": Wrong(
        _into(Setup(params=lambda model: list(model.parameters())[1:])),
        CheckpointError,
        r"the checkpoint has 9 parameters, the optimizer 8, and not both know their names: build the same optimizer",
    ),
    "another class": Wrong(
        _into(SETUPS["momentum"]),
        CheckpointError,
        r"group 0 was optimized by AdamW and is now by SGD, which cannot use its state: build the same optimizer",
    ),
    "other groups": Wrong(
        _into(Setup(params=_two_groups)),
        CheckpointError,
        r"the checkpoint has 1 parameter groups, the optimizer has 2: build the same groups",
    ),
    "no weights": Wrong(
        _no_weights, CheckpointError, r"bare was saved without model=, so it has no weights to load: load it without"
    ),
    "the model is an optimizer": Wrong(
        lambda group, path: zerostep.load(path, SETUPS["adamw"].make(group, "auto")[1], "model"),  # type: ignore[arg-type]
        TypeError,
        r"model must be a torch\.nn\.Module, got a str",
    ),
}


def _wrong_uses(group: ProcessGroup, root: str) -> dict[str, str]:
    path = Path(root, "it")
    pair = SETUPS["adamw"].make(group, "auto")
    SETUPS["adamw"].train(pair, group)
    zerostep.save(path, *reversed(pair))
    found = {}
    for name, wrong in WRONG.items():
        dist.barrier(group)
        with pytest.raises(wrong.kind) as caught:
            wrong.act(group, path)
        assert type(caught.value) is wrong.kind, f"{name}: {caught.value!r}"
        found[name] = str(caught.value)
        dist.barrier(group)
        shutil.rmtree(path.parent / "bare", ignore_errors=True)
        assert os.listdir(path.parent) == ["it"], f"{name}: {os.listdir(path.parent)}"
    zerostep.load(path, *reversed(pair))
    return found


def test_wrong_uses_are_told_on_every_rank_and_change_nothing(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(_wrong_uses, 2, str(tmp_path)):
        for name, wrong in WRONG.items():
            assert re.search(wrong.text, texts[name]), f"{name}: {texts[name]}"


def _moved_to_another_group(group: ProcessGroup, root: str) -> None:
    def cut(place: int, model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [{"params": named[:place]}, {"params": named[place:], "lr": 0.5}]

    pair = Setup(params=partial(cut, 2)).make(group, "auto")
    zerostep.save(Path(root, "it"), pair[1], pair[0])
    told = r"parameter 'first\.bias' is in group 0, and was in group 1: build the same groups"
    with pytest.raises(CheckpointError, match=told):
        _into(Setup(params=partial(cut, 3)))(group, Path(root, "it"))


def test_a_parameter_that_moved_to_another_group_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_moved_to_another_group, 2, str(tmp_path))


def _ranks_differ(group: ProcessGroup, root: str) -> str:
    pair = SETUPS["adamw"].make(group, "auto")
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        zerostep.save(Path(root, f"of-{dist.get_rank(group)}"), pair[1])
    assert os.listdir(root) == []
    return str(caught.value)


def test_ranks_that_save_under_different_names_say_so(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(_ranks_differ, 2, str(tmp_path)):
        assert (
            "the name of the checkpoint: rank 0 has 'of-0', but rank 1 has 'of-1'; save the same optimizer and model"
            in text
        )


def test_a_manifest_is_json_that_anybody_can_read(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_extra, 2, str(tmp_path / "it"), {"epoch": 3})
    body = json.loads((tmp_path / "it" / "manifest.json").read_text())["manifest"]
    assert (body["format"], body["version"], body["extra"]) == ("zerostep", 2, [["dict", ["epoch", 3]]])
    assert [file["bytes"] for file in body["files"]] == [
        (tmp_path / "it" / file["name"]).stat().st_size for file in body["files"]
    ]
