"""Random training programs that plain DDP supports, by seed."""

from random import Random
from typing import Any

from tests.fuzz.program import (
    AddGroup,
    AllReduce,
    Block,
    Clip,
    CopyOptimizer,
    Differentiate,
    Drop,
    Evaluate,
    Freeze,
    Hand,
    Look,
    Op,
    Options,
    Pass,
    Program,
    RawState,
    ReadGrad,
    Reload,
    Step,
)
from tests.fuzz.rules import State, problem

KINDS = ("linear", "linear", "matrix", "mlp", "norm", "embedding", "held", "double", "spare", "tied")
# Each program has a few of these features: programs that have all of them resemble each other.
FEATURES = {
    "subsets": 0.75,  # ranks use different blocks
    "micro": 0.4,
    "no_sync": 0.4,
    "passes": 0.25,  # two synchronised passes in a step
    "hand": 0.15,
    "clip": 0.35,
    "scaler": 0.15,
    "differentiate": 0.15,
    "collective": 0.3,
    "talk": 0.15,
    "freeze": 0.2,
    "options": 0.15,
    "schedule": 0.15,
    "left_out": 0.12,
    "evaluate": 0.3,
    "reload": 0.15,
    "checkpoint": 0.12,
    "bad": 0.15,  # a batch without a step
    "keep": 0.15,  # gradients are not dropped in some steps
    "drops": 0.3,  # gradients are dropped at odd places
    "refused": 0.08,
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}, {}],
    "AdamW": [{"eps": 1e-3}, {"eps": 1e-3, "amsgrad": True}],
    "RMSprop": [{"eps": 1e-2}, {"eps": 1e-2, "momentum": 0.5}],
}
REFUSED = (
    *("shared-memory", "left-out-of-ddp", "whole-model-optimizer", "read-gradient"),
    *("step-inside-no-sync", "copy-optimizer", "state-dict-alone"),
)


def generate(seed: int, world: int) -> Program:
    """The program of a seed for this number of ranks."""
    program = Generator(Random(f"{seed}/{world}"), seed, world).program()
    assert not problem(program), problem(program)
    return program


class Generator:
    """Draws one program."""

    def __init__(self, random: Random, seed: int, world: int) -> None:
        self.random, self.seed, self.world = random, seed, world
        self.features = {name for name, chance in FEATURES.items() if random.random() < chance}
        self.refused = random.choice(REFUSED) if "refused" in self.features else ""
        self.drop = random.choices(["optimizer", "model", "zeros"], [3, 3, 1])[0]
        self.ops: list[Op] = []

    def has(self, feature: str, chance: float = 1.0) -> bool:
        return feature in self.features and self.random.random() < chance

    def program(self) -> Program:
        random = self.random
        blocks = self._blocks()
        optimizer = "LBFGS" if self.refused == "whole-model-optimizer" else random.choice(list(OPTIONS))
        self.base = Program(
            world=self.world,
            blocks=blocks,
            ops=(),
            width=random.choice((3, 5, 7)),
            optimizer=optimizer,
            options=self._options(optimizer),
            groups=1 if optimizer == "LBFGS" else random.choice((1, 1, 2)),
            left_out=self._left_out(blocks),
            scaler="scaler" in self.features and optimizer != "LBFGS",
            schedule="schedule" in self.features,
            shared_memory=self.refused == "shared-memory",
            seed=self.seed % 1_000_003,
        )
        self.state = State.begin(self.base)
        if optimizer != "LBFGS":  # whose step needs a closure
            for number in range(random.choice((2, 3, 3, 4))):
                self._step(number)
        return Program(**{**self.base.__dict__, "ops": tuple(self.ops)})

    def _blocks(self) -> tuple[Block, ...]:
        kinds = [self.random.choice(KINDS) for _ in range(self.random.randint(3, 6))]
        blocks: list[Block] = []
        for kind in kinds:
            matrices = [number for number, block in enumerate(blocks) if block.kind == "matrix"]
            if kind == "tied" and not matrices:
                kind = "matrix"
            blocks.append(Block(kind, self.random.choice(matrices) if kind == "tied" else -1))
        return tuple(blocks)

    def _options(self, optimizer: str) -> tuple[tuple[str, Any], ...]:
        if optimizer == "LBFGS":
            return (("lr", 0.1),)
        options = {"lr": 0.02, "weight_decay": self.random.choice((0.0, 0.1, 0.3))}
        options |= self.random.choice(OPTIONS[optimizer])
        if self.random.random() < 0.2:
            options["foreach"] = False
        return tuple(options.items())

    def _left_out(self, blocks: tuple[Block, ...]) -> int:
        if self.refused != "left-out-of-ddp" and "left_out" not in self.features:
            return -1
        targets = {block.target for block in blocks}
        free = [n for n, block in enumerate(blocks) if n not in targets and block.kind != "tied"]
        return self.random.choice(free) if free else -1

    def add(self, *ops: Op) -> bool:
        """Add operations if DDP supports all of them now."""
        state = self.state
        for op in ops:
            if state.problem(op):
                return False
            state = state.after(op)
        self.state = state
        self.ops += ops
        return True

    # ------------------------------------------------------------------ one step

    def _step(self, number: int) -> None:
        random = self.random
        if self.has("freeze", 0.5):
            self._freeze()
        if self.has("evaluate", 0.3):
            self._evaluate()
        if not (self.has("keep", 0.5) and number):
            self.add(Drop(self.drop))
        if self.has("hand", 0.3):
            self._hand()
        inf = random.randrange(self.world) if self.base.scaler and random.random() < 0.15 else -1
        self._passes(inf)
        if self.has("bad", 0.35):
            self._between()
            self.add(Drop(random.choice(("model", "optimizer", "model"))))
            if not self.has("bad", 0.5):
                return
            self._passes(-1)
        self._between()
        self._refuse(number)
        if self.state.problem(Step()):
            self.add(self._pass(True, every=True))
        self.add(Step())
        if inf >= 0:
            self.add(Drop(random.choice(("model", "optimizer"))))
        self._after(number)

    def _passes(self, inf: int) -> None:
        random = self.random
        syncs = [True]
        if self.has("micro", 0.6) or self.has("no_sync", 0.6) or self.has("passes", 0.6):
            extra = random.randint(1, 2)
            syncs = [not ("no_sync" in self.features and random.random() < 0.7) for _ in range(extra)] + syncs
            if "passes" not in self.features and "micro" not in self.features:
                syncs = [False] * extra + [True]
        for number, sync in enumerate(syncs):
            last = number == len(syncs) - 1
            op = self._pass(sync, inf if last else -1, every=last and not all(syncs) and random.random() < 0.7)
            self.add(op)
            if not last and self.has("drops", 0.3):
                self._odd_drop()
            if not last and self.has("collective", 0.3):
                self.add(AllReduce())
            if not last and self.has("hand", 0.15):
                self._hand()
        if self.state.unsynchronised:
            self.add(self._pass(True, every=True))
        if self.state.unsynchronised:
            self.add(Drop("model"), self._pass(True))

    def _uses(self, every: bool = False) -> tuple[tuple[int, ...], ...]:
        """Blocks for each rank, with something that is trained; `every` adds all that has gradients to synchronise."""
        count = len(self.base.blocks)
        owed = {unit for unit in self.state.unsynchronised if unit in self.state.trainable} if every else set()
        common = self._use(count)
        uses = []
        for _ in range(self.world):
            use = self._use(count) if "subsets" in self.features else common
            uses.append(tuple(sorted(set(use) | owed)))
            if "subsets" in self.features and owed and self.random.random() < 0.5:
                owed = set()  # one rank is enough
        return tuple(uses)

    def _use(self, count: int) -> tuple[int, ...]:
        chance = self.random.choice((0.4, 0.7, 1.0)) if "subsets" in self.features else self.random.choice((0.7, 1.0))
        while True:
            use = tuple(number for number in range(count) if self.random.random() < chance)
            if self.state.used(use) & self.state.held:
                return use

    def _pass(self, sync: bool, inf: int = -1, every: bool = False) -> Pass:
        random = self.random
        checkpoint = "plain" if self.has("checkpoint", 0.6) else ""
        if not sync and checkpoint and random.random() < 0.5:
            checkpoint = "reentrant"
        return Pass(
            self._uses(every),
            sync=sync,
            twice=not sync and not checkpoint and random.random() < 0.2,
            retain=not checkpoint and self.has("differentiate", 0.3),
            checkpoint=checkpoint,
            talk=self.has("talk", 0.6),
            inf_rank=inf,
        )

    # ------------------------------------------------------------------ other operations

    def _between(self) -> None:
        """Between backward and step."""
        draws = [
            (self.has("collective", 0.7), lambda: self.add(AllReduce())),
            (self.has("differentiate", 0.5), lambda: self.add(Differentiate(self._uses()))),
            (self.has("clip", 0.7), self._clip),
            (self.has("hand", 0.3), self._hand),
            (self.has("drops", 0.2), self._odd_drop),
            (self.has("clip", 0.15), self._clip),
            (self.has("evaluate", 0.15), self._evaluate),
        ]
        chosen = [call for wanted, call in draws if wanted]
        if self.random.random() < 0.3:
            self.random.shuffle(chosen)
        for call in chosen:
            call()

    def _clip(self) -> None:
        how = self.random.choices(("ours", "ask", "norm", "value"), (3, 1, 3, 2))[0]
        norm_type = self.random.choice((2.0, 2.0, float("inf"), 1.0))
        self.add(Clip(how, norm_type if how != "value" else 2.0, self.random.choice((0.5, 0.05, 1000.0))))

    def _hand(self) -> None:
        self.add(Hand(self.random.randrange(len(self.base.blocks)), self.random.randrange(1000)))

    def _odd_drop(self) -> None:
        how = self.random.choice(("optimizer", "model", "zeros", "some", "some"))
        count = len(self.base.blocks)
        blocks = tuple(sorted(self.random.sample(range(count), self.random.randint(1, count)))) if how == "some" else ()
        self.add(Drop(how, blocks))

    def _freeze(self) -> None:
        block = self.random.randrange(len(self.base.blocks))
        frozen = set(range(len(self.base.blocks))) - self.state.trainable
        if frozen and self.random.random() < 0.6:
            self.add(Freeze(self.random.choice(sorted(frozen)), True))
        elif len(self.state.trainable & self.state.held) > 2:
            self.add(Freeze(block))

    def _evaluate(self) -> None:
        how = self.random.choice(("model", "block", "read"))
        self.add(Evaluate(how, self.random.randrange(len(self.base.blocks)) if how != "model" else 0))

    def _after(self, number: int) -> None:
        """After a step."""
        if self.has("options", 0.5):
            self.add(Options(self.random.choice((0.5, 1.5)), self.random.choice((0.0, 0.2))))
        if self.has("reload", 0.5):
            self.add(Reload(self.random.choice(("optimizer", "model"))))
        if self.base.left_out >= 0 and self.base.left_out not in self.state.held and self.random.random() < 0.6:
            self.add(AddGroup())
        if self.has("evaluate", 0.4):
            self._evaluate()
        if self.has("drops", 0.3):
            self._odd_drop()
        if self.random.random() < 0.25:
            self.add(Look())
        after: dict[str, Op] = {"copy-optimizer": CopyOptimizer(), "state-dict-alone": RawState()}
        if self.refused in after and self.random.random() < 0.5:
            self.add(after[self.refused])

    def _refuse(self, number: int) -> None:
        """Between backward and step, something that is refused."""
        if self.refused == "read-gradient":
            block = self.random.randrange(len(self.base.blocks))
            self.add(ReadGrad(block, self.random.choice(("read", "edit"))))
        if self.refused == "step-inside-no-sync":
            self.add(Step(inside=True))
