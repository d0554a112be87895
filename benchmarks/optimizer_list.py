"""The optimizer classes that `benchmarks.optimizers` tries, by the package that has them."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class Entry:
    """One class: where it comes from, its options, and what it needs.

    `matrices`: it takes nothing else. `closure`: its step needs one.
    """

    package: str
    module: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    matrices: bool = False
    closure: bool = False

    def load(self) -> type[Optimizer]:
        """The class; raises `ImportError` or whatever its package raises."""
        found: type[Optimizer] = getattr(importlib.import_module(self.module), self.name)
        return found


MODULES = {
    "torch": "torch.optim",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "prodigy-plus-schedule-free": "prodigyplus",
    "dadaptation": "dadaptation",
    "lion-pytorch": "lion_pytorch",
    "adan-pytorch": "adan_pytorch",
    "adabelief-pytorch": "adabelief_pytorch",
    "adam-mini": "adam_mini",
    "adamw-bf16": "adamw_bf16",
    "apollo-torch": "apollo_torch",
    "came-pytorch": "came_pytorch",
    "galore-torch": "galore_torch",
    "q-galore-torch": "q_galore_torch",
    "grams-pytorch": "grams",
    "grokadamw": "grokadamw",
    "kron-torch": "kron_torch",
    "muon-optimizer": "muon",
    "pytorch-lamb": "pytorch_lamb",
    "pytorch-ranger": "pytorch_ranger",
    "ranger-adabelief": "ranger_adabelief",
    "ranger21": "ranger21",
    "sophia-opt": "sophia_opt",
    "torch-optimi": "optimi",
    "transformers": "transformers.optimization",
    "timm": "timm.optim",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "heavyball": "heavyball",
    "torch-optimizer": "torch_optimizer",
    "pytorch_optimizer": "pytorch_optimizer",
}
"""The import name of each package, in the order of the table."""

# Bases, wrappers of another optimizer or of a model, and what a package only passes on from elsewhere.
_LEFT_OUT = {
    "torch": ("SparseAdam",),
    "prodigy-plus-schedule-free": ("CoreOptimiser",),
    "kron-torch": ("DistributedKron", "DistributedOneSidedKron"),
    "transformers": ("LayerWiseDummyOptimizer",),
    "apollo-torch": ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"),
    "timm": ("Lookahead", "MVLR", "Optimizer"),
    "torchao": ("_AdamW", "CPUOffloadOptimizer"),
    "bitsandbytes": ("PytorchLARS",),
    "heavyball": ("SOAPBase", "PSGDBase", "SplitOpt", "SAMWrapper", "BaseOpt"),
    "torch-optimizer": ("Lookahead",),
    "pytorch_optimizer": (
        *("Lookahead", "SAM", "GSAM", "WSAM", "BSAM", "LookSAM", "FriendlySAM", "TRAC", "OrthoGrad", "PCGrad"),
        *("SafeFP16Optimizer", "ScheduleFreeWrapper", "LOMO", "AdaLOMO", "DeMo", "Optimizer", "BaseOptimizer"),
        *(
            "SGD",
            "Adam",
            "AdamW",
            "NAdam",
            "RAdam",
            "RMSprop",
            "ASGD",
            "LBFGS",
            "AdaDelta",
            "AdaMax",
            "DistributedMuon",
        ),
    ),
}
# Of the large collections, the classes that are used most; `everything=True` takes all.
_CHOSEN = {
    "timm": ("AdamP", "Adopt", "LaProp", "Lamb", "Lars", "NAdamW"),
    "heavyball": ("ADOPT", "AdamW", "Muon", "PSGDKron", "SFAdamW", "SOAP"),
    "bitsandbytes": ("AdEMAMix", "AdamW", "AdamW8bit", "LAMB", "Lion8bit"),
    "torch-optimizer": ("AdaBound", "DiffGrad", "NovoGrad", "QHAdam", "Shampoo", "Yogi"),
    "pytorch_optimizer": (
        *("ADOPT", "AdEMAMix", "AdaFactor", "AdamMini", "Adan", "CAME", "GaLore", "Kron", "LaProp", "MADGRAD"),
        *("MARS", "Muon", "Prodigy", "SCION", "SOAP", "ScalableShampoo", "ScheduleFreeAdamW", "StableAdamW", "Tiger"),
    ),
}
_MATRICES = ("Muon", "SingleDeviceMuon")
_CLOSURE = ("LBFGS", "AliG", "Closure")
_OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("torch", "SGD"): {"lr": 0.05, "momentum": 0.9},
    ("torch", "LBFGS"): {"lr": 0.1, "max_iter": 3},
    ("galore-torch", "GaLoreAdafactor"): {"lr": 1e-2, "relative_step": False},
    ("transformers", "Adafactor"): {"lr": 1e-2, "relative_step": False},
    ("sophia-opt", "SophiaG"): {"lr": 1e-3},
}
_RATES = {"dadaptation": 1.0, "prodigyopt": 1.0, "prodigy-plus-schedule-free": 1.0}


def entries(package: str, everything: bool = False) -> Iterator[Entry]:
    """The classes of a package, in the order of their names; raises `ImportError` if it is not installed."""
    module = importlib.import_module(MODULES[package])
    for name, kind in sorted(vars(module).items()):
        left_out = name in _LEFT_OUT.get(package, ()) or name.startswith(("_", "Paged")) or name.endswith("32bit")
        if _is_optimizer(kind) and not left_out and (everything or name in _CHOSEN.get(package, (name,))):
            options = _OPTIONS.get((package, name), _rate(package, kind))
            yield Entry(package, MODULES[package], name, options, name in _MATRICES, name.endswith(_CLOSURE))


def _is_optimizer(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer


def _rate(package: str, kind: type[Optimizer]) -> dict[str, Any]:
    """A learning rate, for a class that takes one."""
    names = inspect.signature(kind).parameters
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
    return {"lr": _RATES.get(package, 1e-2)} if "lr" in names or open_ended else {}
