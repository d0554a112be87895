"""The parameter groups that one set of ranks divides: nearly always all groups, and all ranks of the optimizer.

A group may name ranks of its own, as experts do that have fewer replicas than the rest of the model. Each such set of
ranks has a `Division`, with a layout, an engine and state of its own. What all of them have in common (passes, steps,
norms, errors) goes by the first division, that of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerostep.comm.agreement import Fact, agreed, facts_of, layout_facts
from zerostep.comm.mesh import Ranks, resolve
from zerostep.comm.transport import Transport
from zerostep.comm.value_samples import ValueSamples
from zerostep.dtensors import sharding_groups
from zerostep.optim.sharded_state import ShardedState
from zerostep.plan.buckets import extend
from zerostep.plan.groups import GROUP_KEY, Group, all_params, without_params
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.state.audit import AuditSubject
from zerostep.state.param_state import Entry
from zerostep.step.engine import Engine
from zerostep.step.gathering import ForwardHooks
from zerostep.step.grad_sources import AutogradSource, GradSource
from zerostep.step.initial_values import Titled, broadcast_facts, broadcast_values, tensors_beside, tensors_of
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.labels import PhaseTimer
from zerostep.step.passes import Passes
from zerostep.step.place import Progress
from zerostep.step.reference import ReferenceOptimizer
from zerostep.step.step_part import StepPart
from zerostep.step.used_mask import pack_mask, union_of_masks
from zerostep.step.weak import weakly

Groups = Callable[[], list[Group]]  # the user may replace the list


@dataclass(frozen=True)
class OwnRanks:
    """A process group that parameter groups name, its `members` among the optimizer's ranks, and those groups."""

    process_group: dist.ProcessGroup
    members: tuple[int, ...]
    groups: frozenset[int]


class Division:
    """The groups for which `owns` is true, given by their number, on `ranks`. `groups` are those of the optimizer.

    `members` are the ranks that divide one copy here, by their numbers in the optimizer.

    Seen from here all groups exist, and those of other divisions have no parameters: so a group has one number.
    """

    def __init__(
        self,
        ranks: Ranks,
        planner: LayoutPlanner,
        model: nn.Module,
        groups: Groups,
        owns: Callable[[int], bool],
        members: Sequence[int],
    ) -> None:
        self.ranks, self.members = ranks, members
        self._planner, self._model, self._outer, self._owns = planner, model, groups, owns
        self._layout: Layout | None = None
        self._part: StepPart | None = None
        self._state: ShardedState | None = None
        self._forward_hooks: ForwardHooks | None = None
        self._averaged_over = 1

    def owns(self, group: int) -> bool:
        """Whether a group is divided here."""
        return self._owns(group)

    def groups(self) -> list[Group]:
        """All groups; those of other divisions as copies without parameters."""
        return [group if self._owns(i) else without_params(group) for i, group in enumerate(self._outer())]

    @property
    def params(self) -> list[Tensor]:
        """The parameters of its groups, in the order of its layout."""
        return all_params(self.groups())

    def numbers(self) -> list[int]:
        """For each of its parameters, the number among all of the optimizer."""
        members = [self._owns(i) for i, group in enumerate(self._outer()) for _ in group["params"]]
        return [number for number, own in enumerate(members) if own]

    @property
    def layout(self) -> Layout:
        """Where every element of every parameter lies."""
        assert self._layout is not None
        return self._layout

    @property
    def part(self) -> StepPart:
        """What a step does to its parameters."""
        assert self._part is not None
        return self._part

    @property
    def engine(self) -> Engine:
        """The engine that the steps run on."""
        return self.part.engine

    @property
    def state(self) -> ShardedState:
        """The state of its parameters."""
        assert self._state is not None
        return self._state

    # ------------------------------------------------------------------ plans

    def plan(self) -> None:
        """Plan the layout of its groups, of which there must be parameters."""
        self._layout = self._planner.plan(self.groups(), self.ranks.shards.world_size)

    def plan_last_group(self) -> None:
        """Plan a further group, behind those that there are."""
        groups = self.groups()
        count = len(all_params(groups[:-1]))
        further = self._planner.plan(groups[-1:], self.ranks.shards.world_size, len(groups) - 1, count)
        self._layout = extend(self.layout, further)

    def restore_plan(self, layout: Layout) -> None:
        """Go back to an earlier layout: the ranks have not agreed on a further group."""
        self._layout = layout

    # ------------------------------------------------------------------ what ranks compare

    def param_facts(self) -> list[Fact]:
        """Parameters, options and classes of its groups."""
        return facts_of(self.groups(), self._named_specs(), self._planner.default_class, with_strides=True)

    def layout_facts(self) -> list[Fact]:
        """Where its parameters lie."""
        return layout_facts(self.layout, [spec.name for spec in self._named_specs()])

    def _named_specs(self) -> list[ParamSpec]:
        """The specs with the names of the model, to be compared: in checkpoints unnamed parameters stay unnamed."""
        known = {id(param): name for name, param in self._model.named_parameters()}
        pairs = enumerate(zip(self.layout.params, self.params, strict=True))
        return [replace(spec, name=_compared_name(spec, i, known.get(id(param)))) for i, (spec, param) in pairs]

    def named_positions(self) -> list[tuple[int, str]]:
        """The place of each parameter in the model, with its name."""
        positions, pairs = self._planner.positions, zip(self.params, self._named_specs(), strict=True)
        return [(positions.get(param, len(positions)), spec.name) for param, spec in pairs]

    def sample_unnamed(self) -> ValueSamples:
        """Samples of parameters that have no name, neither of their own nor in the model: only values show an order."""
        entries = enumerate(zip(self._named_specs(), self.params, strict=True))
        unnamed = [(f"parameter {index}", param) for index, (spec, param) in entries if spec.name == f"param.{index}"]
        return ValueSamples([title for title, _ in unnamed], [param for _, param in unnamed])

    def sample_replicated(self) -> ValueSamples:
        """Samples of the parameters that no mesh shards, which its ranks must all have with the same values."""
        pairs = zip(self._named_specs(), self.params, strict=True)
        found = [(f"parameter {spec.name!r}", param) for spec, param in pairs if not sharding_groups(param)]
        return ValueSamples([title for title, _ in found], [param for _, param in found])

    def updated_over_a_mesh(self) -> list[str]:
        """The parameters that a mesh shards, and that are updated as a whole."""
        pairs = zip(self._named_specs(), self.params, strict=True)
        return [spec.name for spec, param in pairs if sharding_groups(param) and not spec.splittable]

    def shared_tensors(self, others: Collection[int]) -> list[Titled]:
        """All that rank 0 sends to the others before the first step of a bare module, but for `others`, which are ids.

        Those are the parameters of other divisions; what lies beside them in the model is theirs, too.
        """
        tensors = tensors_of(self._model, self.layout.params, self.params)
        if not others:
            return tensors
        grouped = set(map(id, all_params(self._outer())))
        beside = {id(tensor) for _, tensor in tensors_beside(self._model, others, grouped)}
        return [(title, tensor) for title, tensor in tensors if id(tensor) not in beside | set(others)]

    def own_tensors(self) -> list[Titled]:
        """The parameters of its groups, and what lies in the model beside them alone, with titles."""
        own, grouped = set(map(id, self.params)), set(map(id, all_params(self._outer())))
        beside = tensors_beside(self._model, own, grouped)
        known = {id(tensor) for _, tensor in beside}
        others = zip(self.layout.params, self.params, strict=True)
        return [*beside, *((f"parameter {spec.name!r}", param) for spec, param in others if id(param) not in known)]

    def agree(self, first: Division) -> None:
        """Plan, and raise unless its ranks have the same parameters, at the same places among those of the first."""
        with agreed(self.ranks.control) as agreement:
            self.plan()
            named = [*first.named_positions(), *self.named_positions()]
            order = Fact("the order of parameters in the model", ", ".join(name for _, name in sorted(named)))
            facts = [*self.param_facts(), *broadcast_facts(self.own_tensors()), order, *self.layout_facts()]
            agreement.compare(facts)
            samples = self.sample_unnamed()
        samples.compare(self.ranks.control, must_be_equal=False)

    # ------------------------------------------------------------------ construction

    def start(
        self,
        tensors: Sequence[Titled],
        timer: PhaseTimer,
        progress: Progress,
        passes: Passes,
        everyone: Transport,
        make_source: Callable[[Engine], GradSource] = AutogradSource,
        reduces: bool = True,
    ) -> None:
        """All ranks agree: make `tensors` equal, move the parameters into flat memory and register hooks.

        `everyone` are all ranks of the optimizer: each has one loss, whatever the ranks of this division.
        """
        planner, self._averaged_over = self._planner, everyone.world_size
        if tensors:
            broadcast_values(self.ranks, [tensor for _, tensor in tensors])
        engine = Engine(self.ranks, self.layout, self.params, planner, reduces, timer, progress, passes)
        members = [list[Tensor]() for _ in self._outer()]
        for leaf in engine.buckets.bind_trainable():
            members[leaf.group].append(leaf.tensor)
        with agreed(everyone):  # a class may refuse the part of one rank
            inners = InnerOptimizers(self.groups(), members, planner.default_class, planner.defaults)
        source = make_source(engine)
        source.extend(engine.buckets.params)
        groups = weakly(self.groups)  # what this object holds must not hold it
        self._part = StepPart(engine, inners, groups, source)
        self._state = ShardedState(self._part, groups, planner, self.ranks)

    def hook_modules(self, check: Callable[[], None]) -> None:
        """With `gather="forward"`: make each module wait for its own parameters; `check` precedes each pass."""
        self._forward_hooks = ForwardHooks(self._model, self.engine.gathers, self._bucket_of(), check)

    def _bucket_of(self) -> dict[Tensor, int]:
        buckets = self.engine.buckets
        return {param: buckets.layout.place_of(index)[0] for index, param in enumerate(buckets.params)}

    def verify_with_reference(self, steps: int) -> None:
        """Compare the next steps with an unsharded optimizer."""
        specs, everyone = self.layout.params, self.ranks.everyone
        self.part.set_reference(
            ReferenceOptimizer(self._planner, self.groups(), specs, everyone, self._averaged_over, steps)
        )

    def start_last_group(self, broadcast: bool) -> None:
        """Begin to train a further group; one of another division has no parameters here."""
        part, engine, group, number = self.part, self.engine, self.groups()[-1], len(self._outer()) - 1
        if self._owns(number):
            engine.extend(self.layout, self.params)
            if broadcast:
                broadcast_values(self.ranks, group["params"])
        leaves = engine.buckets.bind_trainable()
        part.inners.add(group, [leaf.tensor for leaf in leaves if leaf.group == number])
        part.add_leaves([leaf for leaf in leaves if leaf.group != number])
        part.hook_trainable()
        part.add_to_reference(group)
        if self._forward_hooks is not None:
            self._forward_hooks.set_buckets(self._bucket_of())

    # ------------------------------------------------------------------ state

    def position_of(self, member: int) -> int:
        """The rank of a member among those that divide one copy of the state."""
        return self.members.index(member)

    def assembled(self, parts: Sequence[Any]) -> dict[int, Entry]:
        """What was collected, by the number that a parameter has among all of the optimizer."""
        numbers = self.numbers()
        return {numbers[index]: entry for index, entry in self.state.assembled(parts).items()}

    def prepare_load(
        self, saved: Mapping[int, Mapping[str, Any]], named: Mapping[str, Any], options: Sequence[Group]
    ) -> Callable[[], None]:
        """Read this rank's part of whole state, by the numbers of the optimizer; the result replaces all by it."""
        own = {index: saved[number] for index, number in enumerate(self.numbers()) if number in saved}
        return self.state.prepare_load(own, named, options)

    def audit_subject(self, step: int) -> AuditSubject:
        """What an audit of its parameters compares."""
        buckets = self.engine.buckets
        buckets.follow_params()
        return AuditSubject(
            everyone=self.ranks.everyone,
            control=self.ranks.control,
            positions=self.ranks.positions,
            specs=self.layout.params,
            params=buckets.params,
            groups=self.groups(),
            masters=buckets.masters(),
            param_states=self.state.leaves.param_states,
            step=step,
        )


def _compared_name(spec: ParamSpec, index: int, in_model: str | None) -> str:
    """A name that tells the ranks' parameters apart: the user's own, the model's, or both if they differ."""
    if in_model in (None, spec.name):
        return spec.name
    return str(in_model) if spec.name == f"param.{index}" else f"{spec.name}, which is {in_model} in the model"


# ---------------------------------------------------------------------- groups with ranks of their own


def own_ranks(groups: Sequence[Group], ranks: Ranks) -> list[OwnRanks]:
    """The process groups that parameter groups name, in the order of the groups; raises for those that cannot be."""
    found: dict[tuple[int, ...], OwnRanks] = {}
    for number, group in enumerate(groups):
        if group.get(GROUP_KEY) is not None:
            own = _own_ranks(number, group[GROUP_KEY], global_ranks(ranks))
            before = found.get(own.members, own)
            found[own.members] = replace(before, groups=before.groups | own.groups)
    if found and all(group.get(GROUP_KEY) is not None or not group["params"] for group in groups):
        raise ValueError(
            "all parameter groups have a process_group of their own, and none is left for the ranks of the optimizer: "
            "give that group to the optimizer as its process_group, and leave it out of the parameter groups"
        )
    if found and ranks.shards is not ranks.everyone:
        raise ValueError(
            "a parameter group with a process_group of its own needs an optimizer whose process_group is one group of "
            "ranks, not a mesh (replicate, shard): pass a group, or a mesh of one dimension"
        )
    return list(found.values())


def _own_ranks(number: int, given: Any, everyone: list[int]) -> OwnRanks:
    title = f"the process_group of parameter group {number}"
    if isinstance(given, DeviceMesh) and given.ndim != 1:
        raise ValueError(f"{title} is a mesh of {given.ndim} dimensions: pass the submesh of one, mesh[name]")
    process_group = given.get_group() if isinstance(given, DeviceMesh) else given
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{title} must be a process group that this rank is a member of, or a mesh of one dimension; got "
            f"{_shown(process_group)}"
        )
    members = tuple(sorted(dist.get_process_group_ranks(process_group)))
    if not set(members) <= set(everyone) or dist.get_rank() not in members:
        raise ValueError(
            f"{title} has the global ranks {list(members)}, which must be some of the optimizer's own, "
            f"{list(everyone)}, and rank {dist.get_rank()} among them"
        )
    return OwnRanks(process_group, tuple(map(everyone.index, members)), frozenset({number}))


def _shown(given: Any) -> str:
    return "the group of other ranks" if given is dist.GroupMember.NON_GROUP_MEMBER else f"a {type(given).__name__}"


def global_ranks(ranks: Ranks) -> list[int]:
    """The global ranks of all ranks of an optimizer, in their order."""
    return dist.get_process_group_ranks(ranks.group if ranks.group is not None else dist.group.WORLD)


def connect_own(own: OwnRanks, first: Ranks, device: torch.device | None) -> Ranks:
    """The transports of ranks of their own; a collective of all ranks of the optimizer.

    Raises on all ranks if they do not agree about who belongs together: those that do not come would be waited for.
    """
    everyone = range(first.everyone.world_size)
    rows = first.control.all_gather_ints(pack_mask([rank in own.members for rank in everyone]))
    for rank, row in enumerate(rows):
        members = [number for number, flag in enumerate(union_of_masks([row], len(everyone))) if flag]
        strange = [number for number in members if rows[number] != row]
        if strange:
            raise ValueError(
                f"rank {rank} has given its parameter groups {sorted(own.groups)} a process_group with rank "
                f"{strange[0]}, which has given them another one: pass the same group on all of its ranks"
            )
    return resolve(own.process_group, device, first.everyone.presence)
