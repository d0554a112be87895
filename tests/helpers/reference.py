"""Plain DDP with a plain torch optimizer on small models, and exact comparisons with it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

Batch = tuple[Tensor, Tensor]
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

WORDS = 13
OUTPUTS = 3


class Mlp(nn.Module):
    """An embedding, a norm and odd-sized layers with biases, from four words to three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 7)
        self.first = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.second = nn.Linear(11, 5)
        self.last = nn.Linear(5, OUTPUTS)

    def forward(self, words: Tensor) -> Tensor:
        """The prediction for a batch of words."""
        hidden = torch.tanh(self.first(self.words(words).mean(1)))
        result: Tensor = self.last(torch.tanh(self.second(self.norm(hidden))))
        return result


def _matrices() -> nn.Module:
    layers = [nn.Linear(9, 17, bias=False), nn.Tanh(), nn.Linear(17, 7, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(7, OUTPUTS, bias=False))


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(7, OUTPUTS)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _word_inputs(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (size, 4), generator=generator)


def _vector_inputs(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, 9, generator=generator)


def _image_inputs(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (Mlp, _word_inputs),
    "matrices": (_matrices, _vector_inputs),
    "convolutions": (_convolutions, _image_inputs),
}
"""Name -> how to build the model, and how to draw `size` inputs for it."""


def build(name: str = "mlp", seed: int = 0) -> nn.Module:
    """A model of `MODELS` whose weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name][0]()


def batches(seed: int, rank: int, steps: int, model: str = "mlp", size: int = 4) -> list[Batch]:
    """Inputs and targets that depend only on the seed and the rank; more steps continue the same series."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    draw = MODELS[model][1]
    return [(draw(size, generator), torch.randn(size, OUTPUTS, generator=generator)) for _ in range(steps)]


class Case(NamedTuple):
    """An optimizer to compare with: its class, its options and the model it is meant for."""

    kind: type[optim.Optimizer]
    options: dict[str, Any]
    model: str = "mlp"

    def optimizer(self, parameters: Iterable[Any]) -> optim.Optimizer:
        """The plain optimizer of some parameters, parameter groups or named parameters."""
        return self.kind(parameters, **self.options)


ELEMENTWISE: dict[str, Case] = {
    "sgd": Case(optim.SGD, {"lr": 0.05}),
    "sgd_momentum": Case(optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "sgd_nesterov": Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_maximize": Case(optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "adam": Case(optim.Adam, {"lr": 0.01}),
    "adam_amsgrad": Case(optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "adam_maximize": Case(optim.Adam, {"lr": 0.01, "maximize": True}),
    "adamw": Case(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_maximize": Case(optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw_convolutions": Case(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, "convolutions"),
    "nadam": Case(optim.NAdam, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "radam": Case(optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamax": Case(optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    "adadelta": Case(optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "adagrad": Case(optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "rmsprop": Case(optim.RMSprop, {"lr": 0.01}),
    "rmsprop_centered": Case(optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "rprop": Case(optim.Rprop, {"lr": 0.01}),
    "asgd": Case(optim.ASGD, {"lr": 0.05, "t0": 2.0, "weight_decay": 0.01}),
}
"""Optimizers that treat every element by itself."""

MATRIXWISE: dict[str, Case] = {
    "muon": Case(optim.Muon, {"lr": 0.02, "weight_decay": 0.1}, "matrices"),
    "adafactor": Case(optim.Adafactor, {"lr": 0.02, "weight_decay": 0.01}, "matrices"),
}
"""Optimizers that need a parameter whole."""

OPTIMIZERS: dict[str, Case] = ELEMENTWISE | MATRIXWISE


def plain(case: Case, group: ProcessGroup, seed: int = 0, **options: Any) -> tuple[DDP, optim.Optimizer]:
    """The case's model in DDP (with `options`), and the case's optimizer for it."""
    ddp = DDP(build(case.model, seed), process_group=group, **options)
    return ddp, case.optimizer(ddp.parameters())


def train(ddp: nn.Module, optimizer: optim.Optimizer, series: Iterable[Batch]) -> list[float]:
    """One step per batch; returns the loss before each."""
    losses = []
    for inputs, targets in series:
        optimizer.zero_grad()
        loss = mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    """The largest absolute difference of two parameter lists; not a number if either has one."""
    gaps = [_gap(x, y) for x, y in zip(a, b, strict=True)]
    return torch.tensor(gaps, dtype=torch.float64).max().item() if gaps else 0.0


def assert_same_bits(a: Named, b: Named) -> None:
    """Fail at the first tensor that differs in name, dtype, shape or any bit (so -0.0 is not 0.0)."""
    first, second = dict(a), dict(b)
    assert list(first) == list(second), f"names differ: {list(first)} and {list(second)}"
    for name, tensor in first.items():
        _assert_same_tensor(name, tensor, second[name])


def assert_same_state_dict(a: Mapping[str, Any], b: Mapping[str, Any], device: str = "cpu") -> None:
    """Fail at the first entry in which two optimizer state dicts differ: keys, options, types, devices or bits.

    The list of parameters without state, which plain optimizers do not give, is left out.
    """
    ours, theirs = ({key: value for key, value in each.items() if key != "without_state"} for each in (a, b))
    _assert_same("state_dict", ours, theirs, device)


def _assert_same(path: str, a: Any, b: Any, device: str) -> None:
    assert type(a) is type(b), f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, Tensor):
        assert a.device.type == b.device.type == device, f"{path}: on {a.device} and {b.device}, not on {device}"
        _assert_same_tensor(path, a, b)
    elif isinstance(a, Mapping):
        assert set(a) == set(b), f"{path}: only one has {sorted(map(repr, set(a) ^ set(b)))}"
        for key in a:
            _assert_same(f"{path}[{key!r}]", a[key], b[key], device)
    elif isinstance(a, Sequence) and not isinstance(a, str):
        assert len(a) == len(b), f"{path}: {len(a)} and {len(b)} entries"
        for index, pair in enumerate(zip(a, b, strict=True)):
            _assert_same(f"{path}[{index}]", *pair, device)
    else:
        assert a == b, f"{path}: {a!r} and {b!r}"


def _assert_same_tensor(name: str, a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype, f"{name}: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"
    ours, theirs = _bits(a), _bits(b)
    if torch.equal(ours, theirs):
        return
    differing = int((ours != theirs).any(dim=1).sum())
    raise AssertionError(f"{name}: {differing} of {a.numel()} elements differ, by up to {_gap(a, b):.3g}")


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _gap(a: Tensor, b: Tensor) -> float:
    gap = (a.detach().cpu().double() - b.detach().cpu().double()).abs()
    return gap.max().item() if gap.numel() else 0.0
