"""Make a failing program smaller while it still fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Differentiate, Drop, Evaluate, Freeze, Hand, Op, Pass, Program, ReadGrad
from tests.fuzz.rules import blocks_in, problem


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest failing program that greedy removal finds before the time is over."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if time.monotonic() > end:
                return program
            if candidate != program and not problem(candidate) and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller, the smallest ones first."""
    yield _plain_settings(program)
    yield replace(program, ops=tuple(Pass(op.uses, op.sync) if isinstance(op, Pass) else op for op in program.ops))
    yield from _fewer_ops(program)
    yield from _fewer_blocks(program)
    yield from _simpler_passes(program)
    yield from _simpler_settings(program)


def _fewer_ops(program: Program) -> Iterator[Program]:
    count = len(program.ops)
    size = max(1, count // 2)
    while True:
        for start in range(count - size, -1, -size):
            yield replace(program, ops=program.ops[:start] + program.ops[start + size :])
        if size == 1:
            break
        size //= 2


def _fewer_blocks(program: Program) -> Iterator[Program]:
    """Without a block that nothing names, and then without one that passes use."""
    named = set().union(*(blocks_in(op) for op in program.ops), {block.target for block in program.blocks})
    numbers = range(len(program.blocks) - 1, -1, -1)
    if len(program.blocks) > 1:
        for number in sorted(numbers, key=lambda number: number in named):
            if number != program.left_out and all(block.target != number for block in program.blocks):
                yield _without(program, number)


def _without(program: Program, gone: int) -> Program:
    def moved(number: int) -> int:
        return number - (number > gone)

    blocks = tuple(replace(block, target=moved(block.target)) for n, block in enumerate(program.blocks) if n != gone)
    ops = [_renumbered(op, gone) for op in program.ops]
    return replace(
        program, blocks=blocks, ops=tuple(op for op in ops if op is not None), left_out=moved(program.left_out)
    )


def _renumbered(op: Op, gone: int) -> Op | None:
    def rest(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number - (number > gone) for number in blocks if number != gone)

    if isinstance(op, (Pass, Differentiate)):
        return replace(op, uses=tuple(map(rest, op.uses)))
    if isinstance(op, Drop):
        return replace(op, blocks=rest(op.blocks))
    if isinstance(op, (Hand, Freeze, ReadGrad, Evaluate)):
        if op.block == gone:
            return None
        return replace(op, block=op.block - (op.block > gone))
    return op


def _simpler_passes(program: Program) -> Iterator[Program]:
    for number, op in enumerate(program.ops):
        for simpler in _simpler(op):
            if simpler != op:
                yield replace(program, ops=(*program.ops[:number], simpler, *program.ops[number + 1 :]))


def _simpler(op: Op) -> Iterator[Op]:
    if isinstance(op, Drop):
        yield Drop("optimizer")
        return
    if not isinstance(op, (Pass, Differentiate)):
        return
    if isinstance(op, Pass):
        yield Pass(op.uses, op.sync)
        yield replace(op, talk=False)
        yield replace(op, checkpoint="")
        yield replace(op, retain=False)
        yield replace(op, twice=False)
        yield replace(op, inf_rank=-1)
        yield replace(op, sync=True, twice=False, checkpoint="")
    most = tuple(sorted(set().union(*map(set, op.uses))))
    yield replace(op, uses=(most,) * len(op.uses))
    for rank, use in enumerate(op.uses):
        if use != most:
            yield replace(op, uses=(*op.uses[:rank], most, *op.uses[rank + 1 :]))
    for rank, use in enumerate(op.uses):
        for gone in use if use != most or len(set(op.uses)) == 1 else ():
            rest = tuple(number for number in use if number != gone)
            yield replace(op, uses=(*op.uses[:rank], rest, *op.uses[rank + 1 :]))


def _plain_settings(program: Program) -> Program:
    """Everything about the model and the optimizer at once."""
    if program.optimizer == "LBFGS":
        return program
    simple = (("lr", 0.1), ("weight_decay", 0.1))
    return replace(program, groups=1, scaler=False, schedule=False, width=3, optimizer="SGD", options=simple)


def _simpler_settings(program: Program) -> Iterator[Program]:
    plain = {"groups": 1, "scaler": False, "schedule": False, "left_out": -1, "width": 3}
    for name, value in plain.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})  # type: ignore[arg-type]
    simple = replace(program, optimizer="SGD", options=(("lr", 0.1), ("weight_decay", 0.1)))
    if program.optimizer not in ("SGD", "LBFGS") or len(program.options) > 2:
        yield simple
    for number, block in enumerate(program.blocks):
        if block.kind not in ("linear", "norm", "matrix"):
            simpler = replace(block, kind="linear", target=-1)
            yield replace(program, blocks=(*program.blocks[:number], simpler, *program.blocks[number + 1 :]))
