"""`dcp_state`: a sharded optimizer as `torch.distributed.checkpoint` (DCP) can save and load it, at any world size.

Each rank shows its own part of every parameter's state, which lies in a tensor that all ranks have together. A load
fills new memory; the optimizer changes when every rank has all it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerostep.comm.agreement import agreed
from zerostep.comm.objects import gather_object
from zerostep.errors import CheckpointError
from zerostep.integrations.dcp_metadata import About, Entry, names_of
from zerostep.integrations.dcp_tensor import Box, DcpTensor
from zerostep.optim.view import OptimizerView, view_of
from zerostep.plan.layout import Span
from zerostep.state.expected import Expected, expecting
from zerostep.state.param_state import MASTER, ParamState, SavedState, order_of, shaped

__all__ = ["DcpState", "dcp_state"]

DcpTensors = dict[str, DcpTensor]


def dcp_state(optimizer: Any) -> DcpState:
    """What to give to `torch.distributed.checkpoint`'s `save` and `load` in place of a sharded optimizer.

    `dcp.save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path)`, and the same with `load`. All ranks of the
    optimizer call it together. It loads at any world size, into either optimizer class and with either partition.
    """
    return DcpState(optimizer)


class DcpState:
    """An optimizer with the two methods that DCP asks for; both are collective."""

    def __init__(self, optimizer: Any) -> None:
        view_of(optimizer)
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for DCP alone: it is read by a save, and stands for what a load reads."""
        view = view_of(self._optimizer)
        trouble = _trouble(view)
        with agreed(view.everyone):
            shares, names = {share.param: share for share in view.shares()}, names_of(view)
            sketch = _Sketch(view, expecting(self._optimizer.group_optimizer), shares, self._optimizer._proves, trouble)
            state = {names[number]: pieces for number, pieces in sketch.all(names) if pieces}
        known = gather_object(view.everyone, lambda: _described(names, shares), 0)
        with agreed(view.everyone):
            text = About.of(view, _merged(known)).encode()
        # Only rank 0 knows the whole.
        about = DcpTensor((), torch.uint8, box=Box((), ()) if known else None, value=text, trouble=trouble)
        return {"about": about, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what DCP has loaded into what `state_dict` gave. An error leaves everything as it was."""
        view = view_of(self._optimizer)
        view.saves.finish()
        with agreed(view.everyone):
            about = About.decode(_text(state_dict))
            names = names_of(view)
            _check(about, view, names)
            saved = dict(_saved(about, view, names, state_dict["state"]))
            chosen = [dict(group) for group in about.options]
            commit = view.restore(saved, about.others, chosen, about.step)
        with agreed(view.everyone):
            commit()


# ---------------------------------------------------------------------- what a rank shows


def _trouble(view: OptimizerView) -> str | None:
    """Why the state must not be saved; it may still be replaced."""
    try:
        view.settle()
    except Exception as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Sketch:
    """The pieces of a rank: of what it has, and of what it would have after a step.

    Where `whole` is true, a load reads the state of all parameters whole.
    """

    view: OptimizerView
    expected: Callable[[Any], Expected]
    shares: Mapping[int, ParamState]
    whole: bool
    trouble: str | None

    def all(self, numbers: Mapping[int, str]) -> Iterator[tuple[int, DcpTensors]]:
        """The pieces of each parameter that has a part here, by its number."""
        parts = {each.param: each.part for each in self.view.layout.fragments(self.view.rank)}
        for number in numbers:
            if number in parts or self.whole:
                yield number, self._pieces(number, parts.get(number))

    def _pieces(self, number: int, part: Span | None) -> DcpTensors:
        expected = self.expected(self.view.layout.params[number])
        share = self.shares.get(number)
        like = {
            **expected.per_element,
            **({} if share is None else {key: flat.dtype for key, flat in share.per_element.items()}),
        }
        rest = {**expected.shared, **({} if share is None else _tensors(share.shared))}
        found = {key: self._like(number, key, dtype, part) for key, dtype in like.items()}
        return found | {key: self._rest(number, key, *kind, part) for key, kind in rest.items() if key not in like}

    def _like(self, number: int, key: str, dtype: torch.dtype, part: Span | None) -> DcpTensor:
        numel = self.view.layout.params[number].numel
        whole = Span(0, numel)
        return DcpTensor(
            (numel,),
            dtype,
            box=None if part is None or not self.view.writes else _box(part),
            wanted=_box(whole if self.whole or part is None else part),
            source=self.shares[number].per_element.get(key) if number in self.shares else None,
            trouble=self.trouble,
            memory=self.view.params[number].device,
        )

    def _rest(self, number: int, key: str, shape: tuple[int, ...], dtype: torch.dtype, part: Span | None) -> DcpTensor:
        source = self.shares[number].shared.get(key) if number in self.shares else None
        box = Box((0,) * len(shape), shape)
        return DcpTensor(
            shape,
            dtype,
            box=None if part is None or not self.view.writes else box,
            wanted=box,
            source=None if source is None else source.detach().contiguous(),
            trouble=self.trouble,
            memory=None if source is None else source.device,
        )


def _box(span: Span) -> Box:
    return Box((span.start,), (span.length,))


def _tensors(rest: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(value.shape), value.dtype) for key, value in rest.items() if isinstance(value, Tensor)}


def _described(names: Mapping[int, str], shares: Mapping[int, ParamState]) -> dict[str, Any]:
    """What this rank knows of the state, for rank 0 to write down."""
    found = {}
    for number, share in shares.items():
        tensors = [key for key, value in share.shared.items() if isinstance(value, Tensor)]
        values = {key: value for key, value in share.shared.items() if key not in tensors}
        found[names[number]] = [list(share.per_element), tensors, values]
    return found


def _merged(known: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for rank in known:
        for name, (like, rest, values) in rank.items():
            found.setdefault(name, Entry(tuple(like), tuple(rest), values))
    return found


# ---------------------------------------------------------------------- what was loaded


class _Loaded:
    """The state of one parameter, as far as this rank has read it."""

    def __init__(self, name: str, entry: Entry, pieces: Mapping[str, Any], param: Tensor) -> None:
        self._name, self._entry, self._pieces, self._param = name, entry, pieces, param

    def names(self) -> list[str]:
        """The names of all its pieces; not of masters where there are none now."""
        like = [key for key in self._entry.per_element if key != MASTER or key in self._pieces]
        return [*like, *self._entry.shared, *self._entry.values]

    def is_per_element(self, key: str) -> bool:
        """Whether a piece has one number for each element."""
        return key in self._entry.per_element

    def elements(self, key: str, part: Span) -> Tensor:
        """Some elements of a piece that is like the parameter."""
        piece = self._pieces[key]
        inside = part.shift(-piece.wanted.offsets[0])
        return piece.loaded[inside.start : inside.stop]

    def whole(self, key: str) -> Any:
        """A piece as an unsharded optimizer has it."""
        if key in self._entry.values:
            return self._entry.values[key]
        if key in self._entry.shared:
            return self._pieces[key].loaded
        return shaped(self.elements(key, Span(0, self._param.numel())), self._param)

    def check(self, shown: bool) -> None:
        """`CheckpointError` if a piece was saved that this rank needs and did not know of."""
        for key in (*self._entry.per_element, *self._entry.shared):
            piece = self._pieces.get(key)
            if shown and key != MASTER and not (isinstance(piece, DcpTensor) and piece.loaded is not None):
                raise CheckpointError(
                    f"the checkpoint has state {key!r} of parameter {self._name!r}, which this optimizer would not "
                    "have after its first step: build it with the options that it was saved with, or take one step "
                    "before you load"
                )


def _text(state_dict: Mapping[str, Any]) -> str:
    text = state_dict.get("about")
    if not isinstance(text, str) or "state" not in state_dict:
        raise CheckpointError(
            "this is not what dcp.load() read from a checkpoint of zerostep.dcp_state(optimizer): pass "
            "zerostep.dcp_state(optimizer) to dcp.load()"
        )
    return text


def _saved(
    about: About, view: OptimizerView, names: Mapping[int, str], shown: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[int, SavedState]]:
    owned = {fragment.param for fragment in view.layout.fragments(view.rank)}
    for number, name in names.items():
        if name in about.state:
            found = _Loaded(name, about.state[name], shown.get(name, {}), view.params[number])
            found.check(number in owned or name in shown)
            yield number, found


def _check(about: About, view: OptimizerView, names: Mapping[int, str]) -> None:
    if tuple(view.kinds) != about.kinds:
        raise CheckpointError(
            f"the groups were optimized by {', '.join(about.kinds)}, and are now by {', '.join(view.kinds)}: "
            "build the same optimizer, with the same groups"
        )
    different = set(about.params) ^ set(names.values())
    if different:
        raise CheckpointError(
            f"only one of the checkpoint and the optimizer has parameter {min(different)!r}: build the same model, "
            "with names if it had names"
        )
    for number, name in names.items():
        _check_param(name, about, view, number)


def _check_param(name: str, about: About, view: OptimizerView, number: int) -> None:
    spec, (shape, group, order) = view.layout.params[number], about.params[name]
    for what, now, then in (
        ("shape", spec.shape, shape),
        ("group", spec.group, group),
        ("order of dimensions in memory", order_of(view.params[number]), order),
    ):
        if now != then:
            raise CheckpointError(
                f"parameter {name!r} had {what} {then} and now has {now}: build the same model, in the same memory "
                "format and the same groups"
            )
