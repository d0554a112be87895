"""The ways to train that are compared: plain DDP with the plain optimizer, and those of this package."""

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import LBFGS, SGD, AdamW, RMSprop

from tests.fuzz.model import Model
from tests.fuzz.program import AllReduce, Clip, Drop, Freeze, Hand, Pass, Program, ReadGrad, Step
from tests.fuzz.rules import is_exact, states
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

SMALL_BUCKETS = 0.0002  # megabytes: a block or two
CLASSES: dict[str, Any] = {"SGD": SGD, "AdamW": AdamW, "RMSprop": RMSprop, "LBFGS": LBFGS}


@dataclass(frozen=True)
class Variant:
    """One way to train with this package."""

    name: str
    kind: str  # bare, ddp or zero
    settings: dict[str, Any] = field(default_factory=dict)
    mesh: str = ""  # "rows": one replica per rank, "columns": one copy, sharded
    needs: str = ""  # what its programs may not have

    @property
    def scatters(self) -> bool:
        """Whether gradients are stand-ins."""
        return self.kind != "zero" and self.settings.get("reduction", "scatter") == "scatter"

    @property
    def is_late(self) -> bool:
        """Whether parameters arrive after step() has returned."""
        return self.settings.get("gather") == "forward"

    def takes(self, program: Program) -> bool:
        """Whether the program is one for this variant."""
        if self.kind == "zero" and program.optimizer == "LBFGS":
            return False
        return not self.needs or _updates_in_backward(program)

    def is_exact(self, program: Program) -> bool:
        """Whether results are promised to be equal in every bit."""
        if self.kind == "zero":
            return True
        if self.kind == "ddp" and self.settings.get("reduction") == "all":
            return not any(isinstance(op, Clip) and op.how == "ours" for op in program.ops)
        return is_exact(program)


def _updates_in_backward(program: Program) -> bool:
    """No clipping, scaling, zeroing or setting of gradients by hand, a step after each pass, no graph used twice."""
    if program.scaler or any(isinstance(op, (Clip, Hand, ReadGrad)) for op in program.ops):
        return False
    if any(isinstance(op, Drop) and op.how == "zeros" for op in program.ops):
        return False
    passed = False
    for op, state in zip(program.ops, states(program), strict=False):
        if isinstance(op, Pass) and (passed or state.summed or op.retain):
            return False
        if passed and not isinstance(op, (AllReduce, Freeze, Step)):
            return False  # a batch without a step, or a look at parameters that plain DDP has not updated yet
        passed = (passed or (isinstance(op, Pass) and op.sync)) and not isinstance(op, Step)
    return not passed


def _all_variants() -> list[Variant]:
    found = [
        Variant(f"{kind}-{reduction}-{gather}", kind, {"reduction": reduction, "gather": gather})
        for kind in ("bare", "ddp")
        for reduction in ("scatter", "all")
        for gather in ("step", "forward")
    ]
    found += [
        Variant("parameters", "bare", {"partition": "parameters", "gather": "forward"}),
        Variant("mesh-rows", "bare", mesh="rows"),
        Variant("mesh-columns", "bare", {"gather": "forward"}, mesh="columns"),
        Variant("zero", "zero"),
        Variant("zero-view", "zero", {"parameters_as_bucket_view": True}),
    ]
    if "update" in inspect.signature(ShardedOptimizer.__init__).parameters:
        needs = _updates_in_backward.__doc__ or ""
        found.append(Variant("backward", "bare", {"update": "backward"}, needs=needs))
        late = {"update": "backward", "gather": "forward"}
        found.append(Variant("backward-forward", "bare", late, needs=needs))
    return found


VARIANTS = {variant.name: variant for variant in _all_variants()}


@dataclass
class Side:
    """A model and its optimizer on this rank; `variant` is `None` for plain DDP."""

    module: Model
    model: Any
    optimizer: Any
    variant: Variant | None

    def no_sync(self) -> AbstractContextManager[Any]:
        """Where passes are not synchronised."""
        return self.model.no_sync() if isinstance(self.model, DDP) else self.optimizer.no_sync()

    def synchronize(self) -> None:
        """Wait for late parameters."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.synchronize()

    @property
    def params(self) -> list[nn.Parameter]:
        """What the optimizer holds."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def make(program: Program, variant: Variant | None, group: Any, meshes: dict[str, Any]) -> Side:
    """Build the model and the optimizer of a program."""
    module = Model(program, group)
    kind = CLASSES[program.optimizer]
    params, options = groups_of(program, module), dict(program.options)
    model: Any = module
    if variant is None or variant.kind != "bare":
        model = DDP(module, process_group=group, find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS)
    if variant is None:
        return Side(module, model, kind(params, **options), None)
    if variant.kind == "zero":
        return Side(module, model, ZeroRedundancyOptimizer(params, kind, group, **variant.settings, **options), variant)
    where = meshes[variant.mesh] if variant.mesh else group
    settings = {"process_group": where, "bucket_mb": SMALL_BUCKETS, **variant.settings}
    return Side(module, model, ShardedOptimizer(model, kind, params, **settings, **options), variant)


def groups_of(program: Program, module: Model) -> list[dict[str, Any]]:
    """The parameter groups at the beginning."""
    out = set(module.blocks[program.left_out].parameters()) if program.left_out >= 0 else set()
    named = [(name, param) for name, param in module.named_parameters() if param not in out]
    if program.groups == 1:
        return [{"params": named}]
    return [{"params": named[::2]}, {"params": named[1::2], "lr": 0.03}]
