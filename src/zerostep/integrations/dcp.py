"""`dcp_state`: save and load a sharded optimizer with `torch.distributed.checkpoint` (DCP), at any world size.

For DCP, the state of each parameter is one tensor of which every rank holds a part. A load fills new memory; the
optimizer changes only after every rank has read everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerostep.checkpoint.load import names_of
from zerostep.checkpoint.seats import Seats, find_seats
from zerostep.comm.agreement import agreed
from zerostep.comm.objects import gather_object
from zerostep.comm.transport import calling
from zerostep.dtensors import local_of
from zerostep.errors import CheckpointError
from zerostep.integrations.dcp_metadata import DcpMetadata, ParamInfo, StateInfo, params_of
from zerostep.integrations.dcp_pieces import Pieces, pieces_of
from zerostep.integrations.dcp_tensor import DcpTensor, region
from zerostep.optim.view import OptimizerView, ViewPart, applying, view_of
from zerostep.plan.blocks import Block
from zerostep.plan.layout import ParamSpec, Span
from zerostep.state.expected import ExpectedState, state_predictor
from zerostep.state.param_state import MASTER, ParamState, SavedState, shaped

DcpTensors = dict[str, DcpTensor]


def dcp_state(optimizer: Any) -> DcpState:
    """Return an object to pass to `torch.distributed.checkpoint`'s `save` and `load` in place of a sharded optimizer.

    `dcp.save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path)`, and the same with `load`. All ranks of the
    optimizer call it together. It loads at any world size, into either optimizer class and with either partition.
    """
    return DcpState(optimizer)


class DcpState:
    """An optimizer as a `Stateful` of DCP; both methods are collective."""

    def __init__(self, optimizer: Any) -> None:
        view_of(optimizer)
        self._optimizer = optimizer

    @calling("the state_dict of dcp_state")
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state as `DcpTensor`s: the source of a save, the target of a load."""
        view = view_of(self._optimizer)
        everyone = view.everyone()
        seats, problem = find_seats(view, everyone), _save_problem(view)
        with agreed(everyone):
            names, params = names_of(view), params_of(view)
            parts = [_PartTensors.of(view, seats, number, problem) for number in range(len(view.parts))]
            state = {
                names[number][index]: tensors
                for number, part in enumerate(parts)
                for index, tensors in part.by_index(names[number])
                if tensors
            }
        infos = gather_object(everyone, lambda: _describe(params if view.crosses else {}, names, parts), 0)
        with agreed(everyone):
            text = DcpMetadata.of(view, _merge_params(params, infos), _merge(infos)).encode()
        # Only rank 0 has the descriptions of all ranks, so only it writes the text.
        written = [region((), ())] if infos else []
        metadata = DcpTensor((), torch.uint8, written=written, value=text, problem=problem)
        return {"about": metadata, "state": state}

    @calling("the load_state_dict of dcp_state")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the optimizer's state by what DCP has loaded into `state_dict()`.

        A checkpoint that does not fit raises on all ranks and leaves everything as it was.
        """
        view = view_of(self._optimizer)
        view.saves.finish()
        everyone = view.everyone()
        with agreed(everyone):
            metadata = DcpMetadata.decode(_metadata_text(state_dict))
            _check_same_model(metadata, view)
            saved = [
                dict(_saved_states(metadata, view, number, names, state_dict["state"]))
                for number, names in enumerate(names_of(view))
            ]
            options = [dict(group) for group in metadata.options]
            commit = view.restore(saved, metadata.global_state, options, metadata.step)
        with applying(view, everyone, "loading what torch.distributed.checkpoint has read"):
            commit()


# ---------------------------------------------------------------------- this rank's tensors


def _save_problem(view: OptimizerView) -> str | None:
    """Return why the state must not be saved, if so; it may still be replaced by a load.

    DCP calls `state_dict()` in a save and in a load, so the error is raised later, by the save alone.
    """
    try:
        view.ensure_complete()
    except Exception as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _PartTensors:
    """The `DcpTensor`s of one part on this rank: of the state it has, and of the state it would have after a step.

    A load into a new optimizer needs the latter, for DCP reads only what `state_dict()` lists.
    """

    part: ViewPart
    blocks: Sequence[Block]
    written: frozenset[int]  # the parameters that this rank writes
    loads_whole_state: bool
    expected: Callable[[ParamSpec], ExpectedState]
    param_states: Mapping[int, ParamState]
    problem: str | None

    @staticmethod
    def of(view: OptimizerView, seats: Seats, number: int, problem: str | None) -> _PartTensors:
        """The tensors of a part; a collective over the meshes that divide shared state."""
        part, seat = view.parts[number], seats.own[number]
        states = {state.param: state for state in part.param_states()}
        written = frozenset(seats.stored_in(seat.layout) if seat.writes else ())
        predict = state_predictor(view.group_optimizer)
        return _PartTensors(part, part.blocks, written, view.loads_whole_state, predict, states, problem)

    def by_index(self, indices: Iterable[int]) -> Iterator[tuple[int, DcpTensors]]:
        """Yield the tensors of each parameter that this rank writes or reads."""
        parts = {fragment.param: fragment.part for fragment in self.part.layout.fragments(self.part.rank)}
        for index in indices:
            if index in parts or self.loads_whole_state:
                yield index, self._tensors(index, parts.get(index))

    def _tensors(self, index: int, part: Span | None) -> DcpTensors:
        spec = replace(self.part.layout.params[index], shape=self.blocks[index].shape)
        expected, state = self.expected(spec), self.param_states.get(index)
        per_element, shared = dict(expected.per_element), dict(expected.shared)
        if state is not None:
            per_element |= {key: flat.dtype for key, flat in state.per_element.items()}
            shared |= {
                key: (tuple(value.shape), value.dtype)
                for key, value in state.shared.items()
                if isinstance(value, Tensor)
            }
        tensors = {key: self._per_element(index, key, dtype, part) for key, dtype in per_element.items()}
        return tensors | {
            key: self._shared(index, key, shape, dtype, part)
            for key, (shape, dtype) in shared.items()
            if key not in per_element
        }

    def _per_element(self, index: int, key: str, dtype: torch.dtype, part: Span | None) -> DcpTensor:
        numel, param = self.part.layout.params[index].numel, self.part.params[index]
        wanted = Span(0, numel) if self.loads_whole_state or part is None else part
        pieces = pieces_of(param, self.blocks[index])
        state = self.param_states.get(index)
        flat = None if state is None else state.per_element.get(key)
        written = part if part is not None and index in self.written else None
        return DcpTensor(
            pieces.shape,
            dtype,
            written=[] if written is None else pieces.regions(written),
            wanted=pieces.regions(wanted),
            sources=None if flat is None or part is None else pieces.split(part, flat),
            problem=self.problem,
            load_device=param.device,
        )

    def _shared(self, index: int, key: str, shape: tuple[int, ...], dtype: torch.dtype, part: Span | None) -> DcpTensor:
        source = self.param_states[index].shared.get(key) if index in self.param_states else None
        whole = region((0,) * len(shape), shape)
        return DcpTensor(
            shape,
            dtype,
            written=[] if part is None or index not in self.written else [whole],
            wanted=[whole],
            sources=None if source is None else [source.detach().contiguous()],
            problem=self.problem,
            load_device=None if source is None else source.device,
        )


def _describe(
    params: Mapping[str, ParamInfo], names: Sequence[Mapping[int, str]], parts: Sequence[_PartTensors]
) -> dict[str, Any]:
    """Return parameters, and the keys and plain values of this rank's state, by name, to be sent to rank 0."""
    infos = {}
    for number, part in enumerate(parts):
        for index, state in part.param_states.items():
            tensors = [key for key, value in state.shared.items() if isinstance(value, Tensor)]
            values = {key: value for key, value in state.shared.items() if key not in tensors}
            infos[names[number][index]] = [list(state.per_element), tensors, values]
    return {"params": dict(params), "state": infos}


def _merge_params(own: Mapping[str, ParamInfo], ranks: Sequence[Mapping[str, Any]]) -> dict[str, ParamInfo]:
    merged = dict(own)
    for rank in ranks:
        for name, info in rank["params"].items():
            merged.setdefault(name, info)
    return merged


def _merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, StateInfo]:
    """Return the state info of all parameters; where ranks share a parameter, that of the lowest rank."""
    merged: dict[str, StateInfo] = {}
    for infos in ranks:
        for name, info in infos["state"].items():
            merged.setdefault(name, StateInfo(*info))
    return merged


# ---------------------------------------------------------------------- loaded state


class _LoadedState:
    """The state of one parameter as far as this rank has read it, as a `SavedState`."""

    def __init__(
        self, name: str, info: StateInfo, tensors: Mapping[str, Any], param: Tensor, wanted: Span, pieces: Pieces
    ) -> None:
        self._name, self._info, self._tensors, self._param = name, info, tensors, param
        self._wanted, self._pieces = wanted, pieces  # what this rank has read of per-element state

    def names(self) -> list[str]:
        # Without masters if the live optimizer keeps none.
        per_element = [key for key in self._info.per_element if key != MASTER or key in self._tensors]
        return [*per_element, *self._info.shared, *self._info.values]

    def is_per_element(self, key: str) -> bool:
        return key in self._info.per_element

    def elements(self, key: str, part: Span) -> Tensor:
        inside = part.shift(-self._wanted.start)
        return self._pieces.join(self._wanted, self._tensors[key].loaded)[inside.start : inside.stop]

    def whole(self, key: str) -> Any:
        if key in self._info.values:
            return self._info.values[key]
        if key in self._info.shared:
            return self._tensors[key].loaded[0]
        return shaped(self.elements(key, Span(0, self._param.numel())), self._param)

    def check_loaded(self) -> None:
        """Raise `CheckpointError` if the checkpoint has a tensor that this rank needs and did not read."""
        for key in (*self._info.per_element, *self._info.shared):
            tensor = self._tensors.get(key)
            if key != MASTER and not (isinstance(tensor, DcpTensor) and tensor.loaded is not None):
                raise CheckpointError(
                    f"the checkpoint has state {key!r} of parameter {self._name!r}, which this optimizer would not "
                    "have after its first step: build it with the options that it was saved with, or take one step "
                    "before you load"
                )


def _metadata_text(state_dict: Mapping[str, Any]) -> str:
    text = state_dict.get("about")
    if not isinstance(text, str) or "state" not in state_dict:
        raise CheckpointError(
            "this is not what dcp.load() read from a checkpoint of zerostep.dcp_state(optimizer): pass "
            "zerostep.dcp_state(optimizer) to dcp.load()"
        )
    return text


def _saved_states(
    metadata: DcpMetadata,
    view: OptimizerView,
    number: int,
    names: Mapping[int, str],
    loaded: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[int, SavedState]]:
    part = view.parts[number]
    owned, blocks = {each.param: each.part for each in part.layout.fragments(part.rank)}, part.blocks
    for index, name in names.items():
        if name in metadata.state:
            param = local_of(part.params[index])
            whole = view.loads_whole_state or index not in owned
            wanted = Span(0, param.numel()) if whole else owned[index]
            pieces = pieces_of(part.params[index], blocks[index])
            state = _LoadedState(name, metadata.state[name], loaded.get(name, {}), param, wanted, pieces)
            if index in owned or name in loaded:
                state.check_loaded()
            yield index, state


def _check_same_model(metadata: DcpMetadata, view: OptimizerView) -> None:
    if tuple(view.optimizer_names) != metadata.optimizer_names:
        raise CheckpointError(
            f"the groups were optimized by {', '.join(metadata.optimizer_names)}, and are now by "
            f"{', '.join(view.optimizer_names)}: build the same optimizer, with the same groups"
        )
    own = params_of(view)
    different = own.keys() - metadata.params.keys()
    if len(view.parts) == 1:  # otherwise other ranks may have other parameters
        different |= metadata.params.keys() - own.keys()
    if different:
        raise CheckpointError(
            f"only one of the checkpoint and the optimizer has parameter {min(different)!r}: build the same model, "
            "with names if it had names"
        )
    for name, info in own.items():
        _check_same_param(name, metadata.params[name], info)


def _check_same_param(name: str, saved: ParamInfo, own: ParamInfo) -> None:
    for what, now, then in zip(("shape", "group", "order of dimensions in memory"), own, saved, strict=True):
        if now != then:
            raise CheckpointError(
                f"parameter {name!r} had {what} {then} and now has {now}: build the same model, in the same memory "
                "format and the same groups"
            )
