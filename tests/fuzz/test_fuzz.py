"""Random training programs: a fixed set on real ranks, and the generator, the shrinker and the table by themselves.

`make fuzz MINUTES=10` runs other programs, for as long as one likes.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.fuzz import program as operations
from tests.fuzz.campaign import Finding, Team, run_one
from tests.fuzz.compare import difference
from tests.fuzz.execute import Record
from tests.fuzz.generate import REFUSED, generate
from tests.fuzz.program import AllReduce, Block, Clip, Drop, Look, Op, Pass, Program, Step
from tests.fuzz.refusals import PLACES, expected, table
from tests.fuzz.rules import problem
from tests.fuzz.shrink import shrink
from tests.fuzz.variants import VARIANTS

# Chosen so that every operation, every kind of block and every row of docs/refused.md occurs.
SEEDS: dict[int, tuple[int, ...]] = {
    2: (0, 5, 8, 10, 58, 63, 98, 106, 310, 377),
    3: (47, 131, 156, 198, 201, 418),
}
CASES = [(seed, world) for world, seeds in SEEDS.items() for seed in seeds]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team() as found:
        yield found


@pytest.mark.parametrize(("seed", "world"), CASES)
def test_random_programs_give_the_numbers_of_ddp(team: Team, seed: int, world: int) -> None:
    program = generate(seed, world)
    found = []
    for name, variant in VARIANTS.items():
        if variant.takes(program):
            kind, detail = run_one(team, program, name)
            found += [] if kind in ("same", "refused") else [f"{name}: {kind}: {detail}"]
            if kind == "hang":
                break  # each takes seconds; `python -m tests.fuzz --seed ...` tries all
    assert not found, "\n".join([*found, str(program)])


def programs() -> list[Program]:
    return [generate(seed, world) for seed, world in CASES]


def test_the_fixed_programs_have_every_operation_and_every_refusal() -> None:
    kinds = {type(op) for program in programs() for op in program.ops}
    assert kinds == set(Op.__subclasses__())
    refused = [expected(program, variant) for program in programs() for variant in VARIANTS.values()]
    assert {refusal.name for refusal in refused if refusal is not None} == set(table())


# The generator.


def test_a_seed_gives_one_program() -> None:
    assert [generate(seed, 2) for seed in range(50)] == [generate(seed, 2) for seed in range(50)]
    assert len({generate(seed, 2) for seed in range(50)}) == 50


@pytest.mark.parametrize("world", [2, 3])
def test_programs_are_supported_by_ddp(world: int) -> None:
    for seed in range(300):
        program = generate(seed, world)
        assert problem(program) == ""
        assert str(program).count("\n") == len(program.ops)


EVERYTHING = ((0, 1), (0, 1))
TWO = (Block("linear"), Block("norm"))


@pytest.mark.parametrize(
    "ops",
    [
        (Pass(((), (0,))),),
        (Pass(EVERYTHING, sync=False), Step()),
        (Pass(EVERYTHING, twice=True),),
        (Pass(EVERYTHING, sync=False), Drop("model"), Pass(((0,), (0,)))),
        (Clip("value"),),
        (operations.Freeze(0), Pass(((0,), (0, 1)))),
        (Pass(EVERYTHING, inf_rank=0),),
        (Pass(((2,), (0,))),),
    ],
    ids=str,
)
def test_programs_that_ddp_does_not_support_are_known(ops: tuple[Op, ...]) -> None:
    assert problem(Program(2, TWO, ops)) != ""
    assert problem(Program(2, TWO, (Pass(EVERYTHING), Step()))) == ""


# The table.


def test_the_table_and_the_generator_know_the_same_refusals() -> None:
    assert set(table()) == set(PLACES) == set(REFUSED)


# The shrinker.


def test_the_shrinker_keeps_only_what_a_failure_needs() -> None:
    def fails(program: Program) -> bool:
        kinds = [type(op) for op in program.ops]
        return AllReduce in kinds and Step in kinds and kinds.index(AllReduce) < kinds.index(Step)

    found = next(program for seed in range(500) if fails(program := generate(seed, 2)))
    small = shrink(found, fails)
    assert small.ops == (AllReduce(), Step())
    assert len(small.blocks) == 1


def test_the_shrinker_makes_ranks_alike_where_that_is_enough() -> None:
    def fails(program: Program) -> bool:
        return any(isinstance(op, Pass) and op.sync and 0 in op.uses[1] for op in program.ops)

    program = Program(2, (*TWO, Block("mlp")), (Pass(((0, 2), (1, 2))), Look(), Pass(((1,), (0, 1)), talk=True)))
    small = shrink(program, fails)
    assert small.ops == (Pass(((0,), (0,))),)


def test_what_is_shrunk_is_still_supported_by_ddp() -> None:
    seen: list[Program] = []

    def fails(program: Program) -> bool:
        seen.append(program)
        return any(isinstance(op, Step) for op in program.ops)

    shrink(generate(3, 3), fails)
    assert len(seen) > 3
    assert [problem(program) for program in seen] == [""] * len(seen)


# The comparison.


def test_a_difference_in_the_last_bit_counts_only_where_bits_are_promised() -> None:
    ours, plain = Record(), Record()
    plain.note("parameters at the end", {"a": torch.ones(3), "b": torch.ones(2)})
    ours.note("parameters at the end", {"a": torch.ones(3), "b": torch.tensor([1.0, 1.0 + 2**-23])})
    assert difference(ours, plain, exact=False, late=False) == ""
    assert "b differs by 1.2e-07 (bits are promised)" in difference(ours, plain, exact=True, late=False)


def test_a_value_that_is_missing_or_not_a_number_is_a_difference() -> None:
    ours, plain = Record(), Record()
    plain.note("loss", torch.ones(()))
    assert difference(ours, plain, exact=False, late=False) != ""
    ours.note("loss", torch.tensor(float("nan")))
    assert difference(ours, plain, exact=False, late=False) == "loss: is not finite on one side"


def test_findings_of_one_defect_have_one_signature() -> None:
    program = generate(0, 2)
    text = "rank {}: parameters at operation {}, Step(): blocks.1.weight differs by {}"
    first = Finding(3, 0, "bare-all-step", program, "different", text.format(0, 7, 6.6e-3))
    second = Finding(9, 1, "bare-all-forward", program, "different", text.format(1, 12, 2.0e-1))
    assert first.signature == second.signature
    assert first.signature != Finding(9, 1, "zero", program, "different", text).signature
