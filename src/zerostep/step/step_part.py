"""What a step does to the parameters that one set of ranks divides: their engine, inner optimizers and reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from zerostep.memory.leaf import Leaf
from zerostep.plan.groups import Group
from zerostep.step.engine import Engine
from zerostep.step.grad_sources import GradSource
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.named_state import NamedState
from zerostep.step.reference import ReferenceOptimizer


class StepPart:
    """One engine with its inner optimizers. `groups` are all groups of the user, without the parameters of others."""

    def __init__(
        self, engine: Engine, inners: InnerOptimizers, groups: Callable[[], Sequence[Group]], source: GradSource
    ) -> None:
        self._engine, self._inners, self._groups, self._source = engine, inners, groups, source
        self._reference: ReferenceOptimizer | None = None

    @property
    def engine(self) -> Engine:
        """The engine that the steps run on."""
        return self._engine

    @property
    def inners(self) -> InnerOptimizers:
        """The inner optimizers."""
        return self._inners

    # ------------------------------------------------------------------ gradients, parameters, options

    def take_gradients_from(self, source: GradSource) -> None:
        """Replace the source of gradients, between two passes."""
        self._source.remove()
        self._source = source
        self.hook_trainable()

    def hook_trainable(self) -> None:
        """Let the source of gradients hook parameters that are trainable now."""
        self._source.extend(self._engine.buckets.params)

    def follow_params(self) -> None:
        """Notice what the user did to parameters and options since the last step."""
        buckets = self._engine.buckets
        self._source.check(buckets.params, buckets.layout.params)
        buckets.follow_params()
        self.add_leaves(buckets.bind_trainable())
        self.hook_trainable()
        self._inners.push_options(self._groups())

    def add_leaves(self, leaves: Sequence[Leaf]) -> None:
        """Give new leaves to the inner optimizers of their groups."""
        for leaf in leaves:
            self._inners.extend(leaf.group, [leaf.tensor])

    def pull_options(self) -> None:
        """Give the groups the options that the inner optimizers have."""
        self._inners.pull_options(self._groups())

    def run_method(self, call: Callable[[Optimizer], Any]) -> list[Any]:
        """Call a method of every inner optimizer, of a reference optimizer's, too; what it returned for each."""
        if self._reference is not None:
            self._reference.call(self._groups(), self._engine.buckets.params, call)
        results = [call(optimizer) for optimizer in self._inners.all]
        self.pull_options()
        if self._reference is not None:
            self._reference.note_options(self._groups())
        return results

    def loaded(self) -> None:
        """All state and options are new."""
        self.pull_options()
        if self._engine.compiled is not None:
            self._engine.compiled.forget_state()

    # ------------------------------------------------------------------ verification

    @property
    def verifies(self) -> bool:
        """Whether an unsharded optimizer runs beside this one."""
        return self._reference is not None

    def set_reference(self, reference: ReferenceOptimizer | None) -> None:
        """Compare the next steps with an unsharded optimizer; `None` ends that."""
        self._reference = reference
        self._engine.set_reference(reference)

    def add_to_reference(self, group: Group) -> None:
        """Show a further group to the reference optimizer, if there is one."""
        if self._reference is not None:
            self._reference.add(group, self._engine.buckets.layout.params)

    def load_reference(
        self, saved: Mapping[int, Mapping[str, Any]], named: NamedState, options: Sequence[Group]
    ) -> None:
        """Load whole state into the reference optimizer, if there is one."""
        if self._reference is not None:
            self._reference.load(saved, named, options)

    def step_reference(self) -> None:
        """Step the reference optimizer, if there is one, with whole gradients; a collective."""
        if self._reference is not None:
            self._reference.step(self._groups(), self._engine.buckets.params, self._engine.whole_gradients())

    def compare_with_reference(self) -> None:
        """Compare all parameters with those of the reference optimizer, if there is one."""
        if self._reference is not None:
            self._reference.compare(self._groups(), self._engine.buckets.params)
            if self._reference.done:
                self.set_reference(None)
