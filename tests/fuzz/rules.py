"""Which programs plain DDP supports, and what a program has done so far.

`State` follows a program operation by operation. A *unit* is a block as far as gradients are concerned: a tied block is
two units, itself and its target.
"""

from dataclasses import dataclass, field

from tests.fuzz.program import (
    AddGroup,
    Clip,
    CopyOptimizer,
    Differentiate,
    Drop,
    Evaluate,
    Freeze,
    Hand,
    Op,
    Pass,
    Program,
    RawState,
    ReadGrad,
    Step,
)


def units_of(program: Program, block: int) -> set[int]:
    """The blocks whose parameters a block uses."""
    target = program.blocks[block].target
    return {block} if target < 0 else {block, target}


@dataclass
class State:
    """Gradients after some operations of a program that does not fail."""

    program: Program
    trainable: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # by the optimizer
    local: list[set[int]] = field(default_factory=list)  # by rank: gradients that are this rank's alone
    present: set[int] = field(default_factory=set)  # gradients that all ranks have
    summed: set[int] = field(default_factory=set)  # those of them that are sums over the ranks
    own: list[set[int]] = field(default_factory=list)  # by rank: units that its passes have used since the last drop
    marked: list[set[int]] = field(default_factory=list)  # by rank: used in no_sync() since the last synchronised pass
    passed: bool = False  # a synchronised pass since the last step or drop, and no norm asked for since
    unscaled: bool = False
    steps: int = 0
    exact: bool = True  # sums have one order at two ranks

    @classmethod
    def begin(cls, program: Program) -> "State":
        """Before the first operation."""
        every = set(range(len(program.blocks)))
        ranks = range(program.world)
        empty: list[list[set[int]]] = [[set() for _ in ranks] for _ in range(3)]
        return cls(program, set(every), every - {program.left_out}, local=empty[0], own=empty[1], marked=empty[2])

    def used(self, use: tuple[int, ...]) -> set[int]:
        """The units that get gradients by a pass through these blocks."""
        return set().union(*(units_of(self.program, block) for block in use)) & self.trainable

    def after(self, op: Op) -> "State":
        """The state after an operation."""
        copy = State(
            self.program,
            set(self.trainable),
            set(self.held),
            [set(units) for units in self.local],
            set(self.present),
            set(self.summed),
            [set(units) for units in self.own],
            [set(units) for units in self.marked],
            self.passed,
            self.unscaled,
            self.steps,
            self.exact,
        )
        copy._apply(op)
        return copy

    def _apply(self, op: Op) -> None:
        if isinstance(op, Pass):
            self._pass(op)
        elif isinstance(op, Drop):
            self._drop(op)
        elif isinstance(op, Hand):
            self._set(op)
        elif isinstance(op, Freeze):
            (self.trainable.add if op.trainable else self.trainable.discard)(op.block)
        elif isinstance(op, AddGroup):
            self._forget(set(range(len(self.program.blocks))))
            self.held.add(self.program.left_out)
        elif isinstance(op, Clip):
            self.unscaled, self.passed = self.program.scaler, False
            self.exact = self.exact and op.how in ("value", "ask")
        elif isinstance(op, Step):
            self.steps, self.unscaled, self.passed = self.steps + 1, False, False

    def _pass(self, op: Pass) -> None:
        used = [self.used(use) for use in op.uses]
        if not op.sync:
            for rank, units in enumerate(used):
                self.local[rank] |= units
                self.own[rank] |= units
                self.marked[rank] |= units
            return
        together = set().union(*used, *self.marked)  # DDP reduces what was used without synchronisation, too
        self.marked = [set() for _ in used]
        self.exact = self.exact and not together & self.summed
        self.present |= together
        self.summed |= together
        for rank, units in enumerate(used):
            self.local[rank] -= together
            self.own[rank] |= units
        self.passed = True

    def _drop(self, op: Drop) -> None:
        every = set(range(len(self.program.blocks)))
        if op.how == "some":
            self._forget(set(op.blocks))
        elif op.how == "zeros":
            alike = set.intersection(*self.local) & self.held
            self.present |= alike
            self.summed -= self.held
            for rank in range(self.program.world):
                self.local[rank] -= alike
        else:
            self._forget(every if op.how == "model" else set(self.held))
        if op.how != "some":
            self.unscaled = False

    def _forget(self, units: set[int]) -> None:
        self.present -= units
        self.summed -= units
        for rank in range(self.program.world):
            self.local[rank] -= units
            self.own[rank] -= units

    def _set(self, op: Hand) -> None:
        self.present.add(op.block)
        self.summed.discard(op.block)
        for rank in range(self.program.world):
            self.local[rank].discard(op.block)
            self.own[rank].discard(op.block)

    # ------------------------------------------------------------------ what DDP supports

    @property
    def unsynchronised(self) -> set[int]:
        """Units of the optimizer with gradients that differ from rank to rank."""
        return set().union(*self.local) & self.held

    def problem(self, op: Op) -> str:
        """Why plain DDP does not support this operation now; empty if it does."""
        if isinstance(op, Pass):
            return self._problem_of_pass(op)
        if isinstance(op, Differentiate):
            return "" if all(self.used(use) & self.held for use in op.uses) else "nothing to differentiate"
        if isinstance(op, (Step, Clip, ReadGrad)):
            return self._problem_of_gradients(op)
        if isinstance(op, Hand):
            return "" if op.block in self.trainable & self.held else "not trained"
        if isinstance(op, AddGroup):
            return "" if self.program.left_out >= 0 and self.program.left_out not in self.held else "nothing to add"
        if isinstance(op, (RawState, CopyOptimizer)):
            return "" if self.steps else "no state yet"
        if isinstance(op, Drop) and op.how == "some":
            return "" if set(op.blocks) <= self.held else "not of the optimizer"
        return ""

    def _problem_of_pass(self, op: Pass) -> str:
        if not all(self.used(use) & self.held for use in op.uses):
            return "a rank uses nothing that is trained"
        for rank, use in enumerate(op.uses):
            gone = self.marked[rank] - self.used(use) - self.local[rank] - self.present
            if op.sync and gone:
                return "DDP misses a gradient that was made inside no_sync() and dropped"
        if op.sync and (op.twice or op.checkpoint == "reentrant"):
            return "DDP reduces once for each forward pass"
        if op.inf_rank >= 0 and not self.program.scaler:
            return "nothing would skip the step"
        return "the gradients were unscaled" if self.unscaled else ""

    def _problem_of_gradients(self, op: Op) -> str:
        if self.unsynchronised:
            return "gradients were not synchronised"
        if not self.present & self.held and (self.program.scaler or (isinstance(op, Clip) and op.how == "value")):
            return "GradScaler and clip_grad_value_ need a gradient"
        if isinstance(op, ReadGrad) and not all(op.block in own & self.present & self.held for own in self.own):
            return "not every rank has that gradient"
        return ""


def states(program: Program) -> list[State]:
    """The state before each operation, and after the last."""
    found = [State.begin(program)]
    for op in program.ops:
        found.append(found[-1].after(op))
    return found


def problem(program: Program) -> str:
    """The first operation that plain DDP does not support, and why; empty if there is none."""
    count = len(program.blocks)
    for number, block in enumerate(program.blocks):
        if block.kind == "tied" and not (0 <= block.target < number and program.blocks[block.target].kind == "matrix"):
            return f"block {number} is tied to no matrix"
    state = State.begin(program)
    for number, op in enumerate(program.ops):
        if any(block >= count for block in blocks_in(op)):
            return f"operation {number} uses a block that does not exist"
        reason = state.problem(op)
        if reason:
            return f"operation {number}, {op}: {reason}"
        state = state.after(op)
    return ""


def blocks_in(op: Op) -> set[int]:
    """The blocks that an operation names."""
    if isinstance(op, (Pass, Differentiate)):
        return set().union(*map(set, op.uses))
    if isinstance(op, Drop):
        return set(op.blocks)
    return {op.block} if isinstance(op, (Hand, Freeze, Evaluate, ReadGrad)) else set()


def is_exact(program: Program) -> bool:
    """Whether two ranks must give equal bits: each gradient is one sum, and norms change none of them."""
    return program.world == 2 and states(program)[-1].exact
