"""`dcp_state`: save and load a sharded optimizer with `torch.distributed.checkpoint` (DCP), at any world size.

For DCP, the state of each parameter is one tensor of which every rank holds a part. A load fills new memory; the
optimizer changes only after every rank has read everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerostep.comm.agreement import agreed
from zerostep.comm.objects import gather_object
from zerostep.comm.transport import calling
from zerostep.errors import CheckpointError
from zerostep.integrations.dcp_metadata import DcpMetadata, StateInfo, names_of
from zerostep.integrations.dcp_tensor import DcpTensor, region
from zerostep.optim.view import OptimizerView, applying, view_of
from zerostep.plan.layout import ParamSpec, Span
from zerostep.state.expected import ExpectedState, state_predictor
from zerostep.state.param_state import MASTER, ParamState, SavedState, order_of, shaped

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
        problem = _save_problem(view)
        with agreed(view.everyone):
            param_states, names = {state.param: state for state in view.param_states()}, names_of(view)
            local = _LocalTensors(view, state_predictor(view.group_optimizer), param_states, problem)
            state = {names[index]: tensors for index, tensors in local.by_index(names) if tensors}
        infos = gather_object(view.everyone, lambda: _describe(names, param_states), 0)
        with agreed(view.everyone):
            text = DcpMetadata.of(view, _merge(infos)).encode()
        # Only rank 0 has the descriptions of all ranks, so only it writes the text.
        written = region((), ()) if infos else None
        metadata = DcpTensor((), torch.uint8, written=written, value=text, problem=problem)
        return {"about": metadata, "state": state}

    @calling("the load_state_dict of dcp_state")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the optimizer's state by what DCP has loaded into `state_dict()`.

        A checkpoint that does not fit raises on all ranks and leaves everything as it was.
        """
        view = view_of(self._optimizer)
        view.saves.finish()
        with agreed(view.everyone):
            metadata = DcpMetadata.decode(_metadata_text(state_dict))
            names = names_of(view)
            _check_same_model(metadata, view, names)
            saved = dict(_saved_states(metadata, view, names, state_dict["state"]))
            options = [dict(group) for group in metadata.options]
            commit = view.restore(saved, metadata.global_state, options, metadata.step)
        with applying(view, "loading what torch.distributed.checkpoint has read"):
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
class _LocalTensors:
    """The `DcpTensor`s of one rank: of the state it has, and of the state it would have after a step.

    A load into a new optimizer needs the latter, for DCP reads only what `state_dict()` lists.
    """

    view: OptimizerView
    expected: Callable[[ParamSpec], ExpectedState]
    param_states: Mapping[int, ParamState]
    problem: str | None

    def by_index(self, indices: Iterable[int]) -> Iterator[tuple[int, DcpTensors]]:
        """Yield the tensors of each parameter that this rank writes or reads."""
        parts = {fragment.param: fragment.part for fragment in self.view.layout.fragments(self.view.rank)}
        for index in indices:
            if index in parts or self.view.loads_whole_state:
                yield index, self._tensors(index, parts.get(index))

    def _tensors(self, index: int, part: Span | None) -> DcpTensors:
        expected, state = self.expected(self.view.layout.params[index]), self.param_states.get(index)
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
        numel = self.view.layout.params[index].numel
        wanted = Span(0, numel) if self.view.loads_whole_state or part is None else part
        return DcpTensor(
            (numel,),
            dtype,
            written=None if part is None or not self.view.writes else region((part.start,), (part.length,)),
            wanted=region((wanted.start,), (wanted.length,)),
            source=self.param_states[index].per_element.get(key) if index in self.param_states else None,
            problem=self.problem,
            load_device=self.view.params[index].device,
        )

    def _shared(self, index: int, key: str, shape: tuple[int, ...], dtype: torch.dtype, part: Span | None) -> DcpTensor:
        source = self.param_states[index].shared.get(key) if index in self.param_states else None
        whole = region((0,) * len(shape), shape)
        return DcpTensor(
            shape,
            dtype,
            written=None if part is None or not self.view.writes else whole,
            wanted=whole,
            source=None if source is None else source.detach().contiguous(),
            problem=self.problem,
            load_device=None if source is None else source.device,
        )


def _describe(names: Mapping[int, str], param_states: Mapping[int, ParamState]) -> dict[str, Any]:
    """Return the keys and plain values of this rank's state by parameter name, to be sent to rank 0."""
    infos = {}
    for index, state in param_states.items():
        tensors = [key for key, value in state.shared.items() if isinstance(value, Tensor)]
        values = {key: value for key, value in state.shared.items() if key not in tensors}
        infos[names[index]] = [list(state.per_element), tensors, values]
    return infos


def _merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, StateInfo]:
    """Return the state info of all parameters; where ranks share a parameter, that of the lowest rank."""
    merged: dict[str, StateInfo] = {}
    for infos in ranks:
        for name, info in infos.items():
            merged.setdefault(name, StateInfo(*info))
    return merged


# ---------------------------------------------------------------------- loaded state


class _LoadedState:
    """The state of one parameter as far as this rank has read it, as a `SavedState`."""

    def __init__(self, name: str, info: StateInfo, tensors: Mapping[str, Any], param: Tensor) -> None:
        self._name, self._info, self._tensors, self._param = name, info, tensors, param

    def names(self) -> list[str]:
        # Without masters if the live optimizer keeps none.
        per_element = [key for key in self._info.per_element if key != MASTER or key in self._tensors]
        return [*per_element, *self._info.shared, *self._info.values]

    def is_per_element(self, key: str) -> bool:
        return key in self._info.per_element

    def elements(self, key: str, part: Span) -> Tensor:
        tensor = self._tensors[key]
        inside = part.shift(-tensor.wanted.offsets[0])
        loaded: Tensor = tensor.loaded[inside.start : inside.stop]
        return loaded

    def whole(self, key: str) -> Any:
        if key in self._info.values:
            return self._info.values[key]
        if key in self._info.shared:
            return self._tensors[key].loaded
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
    metadata: DcpMetadata, view: OptimizerView, names: Mapping[int, str], loaded: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[int, SavedState]]:
    owned = {fragment.param for fragment in view.layout.fragments(view.rank)}
    for index, name in names.items():
        if name in metadata.state:
            state = _LoadedState(name, metadata.state[name], loaded.get(name, {}), view.params[index])
            if index in owned or name in loaded:
                state.check_loaded()
            yield index, state


def _check_same_model(metadata: DcpMetadata, view: OptimizerView, names: Mapping[int, str]) -> None:
    if tuple(view.optimizer_names) != metadata.optimizer_names:
        raise CheckpointError(
            f"the groups were optimized by {', '.join(metadata.optimizer_names)}, and are now by "
            f"{', '.join(view.optimizer_names)}: build the same optimizer, with the same groups"
        )
    different = set(metadata.params) ^ set(names.values())
    if different:
        raise CheckpointError(
            f"only one of the checkpoint and the optimizer has parameter {min(different)!r}: build the same model, "
            "with names if it had names"
        )
    for index, name in names.items():
        _check_same_param(name, metadata, view, index)


def _check_same_param(name: str, metadata: DcpMetadata, view: OptimizerView, index: int) -> None:
    spec, (shape, group, order) = view.layout.params[index], metadata.params[name]
    for what, now, then in (
        ("shape", spec.shape, shape),
        ("group", spec.group, group),
        ("order of dimensions in memory", order_of(view.params[index]), order),
    ):
        if now != then:
            raise CheckpointError(
                f"parameter {name!r} had {what} {then} and now has {now}: build the same model, in the same memory "
                "format and the same groups"
            )
