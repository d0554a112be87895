"""Optimizer classes of all kinds, for tests of the probe."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from tests.helpers.mode_optimizers import Averaging, MatrixAveraging

Group = dict[str, Any]
Params = Sequence[Tensor]


class Plain(Optimizer):
    """Gradient descent. The others change `update`, which sees the parameters of one group."""

    def __init__(self, params: Iterable[Any], lr: Any = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update(group, group["params"])

    def update(self, group: Group, params: Params) -> None:
        for param in params:
            param -= group["lr"] * self.direction(param, gradient_of(param))

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient


def gradient_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


class SignSgd(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sign()


class Lion(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        average = self.state[param].setdefault("average", torch.zeros_like(param))
        update = average.lerp(gradient, 0.1).sign_().add_(param, alpha=0.01)
        average.lerp_(gradient, 0.01)
        return update


class ScheduleFree(Plain):
    """Averages of the iterates, weighted by what the group has counted."""

    def update(self, group: Group, params: Params) -> None:
        group["count"] = group.get("count", 0) + 1
        group["total"] = group.get("total", 0.0) + float(group["lr"])
        for param in params:
            fast = self.state[param].setdefault("fast", param.clone())
            fast -= group["lr"] * gradient_of(param)
            param.lerp_(fast, float(group["lr"]) / group["total"])


class TrustRatio(Plain):
    """As in LAMB."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        square = self.state[param].setdefault("square", torch.zeros_like(param))
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        update = gradient / (square.sqrt() + 1e-6)
        return update * (param.norm() / update.norm())


class Lars(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (0.001 * param.norm() / (gradient.norm() + 1e-8))


class ClipsEach(Plain):
    def __init__(self, params: Iterable[Any], limit: float | None = 1.0) -> None:
        super().__init__(params, limit=limit)

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        limit = self.param_groups[0]["limit"]
        return gradient if limit is None else gradient * torch.clamp(limit / finite_norm(gradient), max=1.0)


def finite_norm(gradient: Tensor) -> Tensor:
    return gradient[gradient.isfinite()].norm()


class IgnoresTiny(Plain):
    def __init__(self, params: Iterable[Any], limit: float = 1e-3) -> None:
        super().__init__(params, limit=limit)

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        limit = self.param_groups[0]["limit"]
        return gradient if finite_norm(gradient) > limit else torch.zeros_like(gradient)


class SkipsZeros(Plain):
    """Decays the weights, but not of a parameter without any gradient."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * param if gradient.any() else gradient


class SkipsOverflow(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient if gradient.isfinite().all() else torch.zeros_like(gradient)


class DecaysMatrices(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * param if param.dim() >= 2 else gradient


class NormalisesRows(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-8)


class SignOfMean(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient.abs() * gradient.mean().sign()


class FactorsLarge(Plain):
    """Second moments by row and column, but of large matrices only."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        if param.dim() != 2 or min(param.shape) < 128:
            return gradient
        square = gradient.square()
        return gradient / (square.mean(0, keepdim=True) * square.mean(1, keepdim=True) + 1e-6).sqrt()


class QuantisesLarge(Plain):
    """Scales by block, but of parameters that consist of whole blocks only."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        if param.numel() < 4096 or param.numel() % 256:
            return gradient
        blocks = gradient.view(-1, 256)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127
        return ((blocks / scale).round() * scale).view_as(gradient)


class Warms(Plain):
    """Element-wise for six steps."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        self.state[param]["step"] = step = self.state[param].get("step", 0) + 1
        return gradient if step <= 6 else gradient / finite_norm(gradient)


class ClipsAll(Plain):
    def update(self, group: Group, params: Params) -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        super().update(group, params)


class ScalesByLargest(Plain):
    """The largest of all gradients is the same number however they are cut: only another instance has another one."""

    def update(self, group: Group, params: Params) -> None:
        largest = max(float(gradient_of(param).nan_to_num(0.0, 0.0, 0.0).abs().max()) for param in params)
        for param in params:
            param -= group["lr"] * gradient_of(param) / largest


class Adapts(Plain):
    """One step size for all, from all gradients."""

    def update(self, group: Group, params: Params) -> None:
        group["seen"] = group.get("seen", 0.0) + sum(float(gradient_of(param).square().sum()) for param in params)
        for param in params:
            param -= gradient_of(param) / math.sqrt(1.0 + group["seen"])


class Distance(Plain):
    """As Prodigy: one step size for all, which grows with the distance that all parameters have come."""

    def __init__(self, params: Iterable[Any], lr: Any = 1.0, d: float = 1e-6) -> None:
        super().__init__(params, lr, d=d, numerator=0.0)

    def update(self, group: Group, params: Params) -> None:
        group["d"], group["numerator"] = self.adapted(params, group["d"], group["numerator"], float(group["lr"]))

    def adapted(self, params: Params, size: float, numerator: float, rate: float) -> tuple[float, float]:
        """Update parameters; the step size for the next step and its numerator."""
        denominator = 0.0
        for param in params:
            gradient, state = gradient_of(param), self.state[param]
            start, total = state.setdefault("start", param.clone()), state.setdefault("total", torch.zeros_like(param))
            numerator += size * rate * float((gradient * (start - param)).nan_to_num().sum())
            total.mul_(0.999).add_(gradient, alpha=size * rate)
            denominator += float(total.nan_to_num().abs().sum())
        for param in params:
            param -= size * rate * gradient_of(param).sign()
        return max(size, numerator / denominator if denominator else 0.0), 0.999 * numerator


class HiddenDistance(Distance):
    """The same; only the parameters show it, when they have come far enough."""

    def update(self, group: Group, params: Params) -> None:
        size, numerator = getattr(self, "hidden", [(group["d"], 0.0)])[0]
        self.hidden = [self.adapted(params, size, numerator, float(group["lr"]))]


class OwnDistance(Distance):
    """The same, for each parameter by itself."""

    def update(self, group: Group, params: Params) -> None:
        self.own = getattr(self, "own", None) or dict.fromkeys(params, (group["d"], 0.0))
        for param in params:
            size, numerator = self.own[param]
            self.own[param] = self.adapted([param], size, numerator, float(group["lr"]))


class SharedState(Plain):
    """A number for all parameters, in state of no parameter; it is of no use yet."""

    def update(self, group: Group, params: Params) -> None:
        entry = self.state["all"]  # type: ignore[index]
        entry["norm"] = entry.get("norm", 0.0) + sum(float(finite_norm(gradient_of(param))) for param in params)
        super().update(group, params)


class OwnTime(Plain):
    """Notes when it was called, and how many parameters it has updated; neither matters."""

    def update(self, group: Group, params: Params) -> None:
        self.called, self.updated = time.perf_counter(), getattr(self, "updated", 0) + len(params)
        super().update(group, params)


class AveragesTogether(Averaging):
    """Looks at all parameters in evaluation mode alone."""

    @torch.no_grad()
    def eval(self) -> None:
        super().eval()
        params = self.param_groups[0]["params"]
        most = max(float(param.nan_to_num(0.0, 0.0, 0.0).abs().max()) for param in params)
        for param in params:
            param /= most


class CountsElements(Plain):
    """Counts the elements of a group, which does not matter."""

    def update(self, group: Group, params: Params) -> None:
        group["elements"] = sum(param.numel() for param in params)
        super().update(group, params)


class Noise(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.rand_like(gradient)


class UnseenNoise(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient + 0.0 * torch.rand_like(gradient)


class RoundsAtRandom(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient if param.dtype is torch.float32 else gradient * (1 + 0.01 * torch.rand_like(gradient))


class RefusesNarrow(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        if param.dtype is not torch.float32:
            raise TypeError("float32 only")
        return gradient


class MovesMemory(Plain):
    def update(self, group: Group, params: Params) -> None:
        for param in params:
            param.data = param.data - group["lr"] * gradient_of(param)


class ScalesItsGradient(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        return gradient.mul_(0.5)


class KeepsRows(Plain):
    """Gathers what it has no use for yet."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        self.state[param]["rows"] = gradient.reshape(len(gradient), -1).sum(1)
        return gradient


class KeepsNorm(Plain):
    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        self.state[param]["norm"] = gradient.norm()
        return gradient


class KeepsMatrices(Plain):
    """Has state for some parameters only."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        if param.dim() == 2:
            self.state[param]["last"] = gradient.clone()
        return gradient


class KeepsMaximum(Plain):
    """One value per element, but not of that element."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        self.state[param]["largest"] = gradient.abs().max().expand_as(gradient).clone()
        return gradient


class KeepsMuch(Plain):
    """Nothing but values per element and values that are the same for all."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[param]
        state.update(last=gradient.clone(), signs=gradient > 0, none=None, kind="much", missing=math.nan)
        state["step"] = state.get("step", torch.zeros((), dtype=torch.int64)) + 1
        return gradient


class Orthogonal(optim.AdamW):
    """Everything of AdamW, then the nearest orthogonal matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.dim() == 2 and param.isfinite().all():
                left, _, right = torch.linalg.svd(param, full_matrices=False)
                param.copy_(left @ right)


class SameAdamW(optim.AdamW):
    pass


class MatricesOnly(Plain):
    """As Muon."""

    def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return left @ right


class MatricesTogether(ClipsAll):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        if any(param.dim() != 2 for param in self.param_groups[0]["params"]):
            raise ValueError("matrices only")


class SameLbfgs(optim.LBFGS):
    pass


class SharpnessAware(Plain):
    """Looks at the gradient at another point, as far away as all parameters together say, and needs a closure."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        for group in self.param_groups:
            closure()
            norm = torch.cat([gradient_of(param).reshape(-1) for param in group["params"]]).norm()
            before = [param.clone() for param in group["params"]]
            for param in group["params"]:
                param += 0.05 * gradient_of(param) / norm
            closure()
            for param, value in zip(group["params"], before, strict=True):
                param.copy_(value)
            self.update(group, group["params"])


class NeedsClosure(Plain):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()
        super().step()


class LooksAhead(Plain):
    """Evaluates its closure where a further step would lead."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            ahead = self.state[param].get("ahead")
            if ahead is not None:
                param -= 0.1 * ahead
        closure()
        for param in self.param_groups[0]["params"]:
            self.state[param]["ahead"] = gradient_of(param).clone()
            param -= 0.1 * gradient_of(param)


class NeedsAccelerator(Plain):
    def update(self, group: Group, params: Params) -> None:
        raise RuntimeError("this kernel is for CUDA tensors")


class NeedsRate(Plain):
    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, lr)


UNKNOWN: dict[type[Optimizer], tuple[bool, bool]] = {
    SignSgd: (True, True),
    Lion: (True, True),
    ScheduleFree: (True, True),
    SameAdamW: (True, True),
    ScalesItsGradient: (True, True),
    KeepsMuch: (True, True),
    RefusesNarrow: (True, True),
    OwnTime: (True, True),
    CountsElements: (True, True),
    OwnDistance: (False, True),
    TrustRatio: (False, True),
    Lars: (False, True),
    ClipsEach: (False, True),
    IgnoresTiny: (False, True),
    SkipsZeros: (False, True),
    SkipsOverflow: (False, True),
    DecaysMatrices: (False, True),
    NormalisesRows: (False, True),
    SignOfMean: (False, True),
    FactorsLarge: (False, True),
    QuantisesLarge: (False, True),
    Warms: (False, True),
    Orthogonal: (False, True),
    MatricesOnly: (False, True),
    MovesMemory: (False, True),
    KeepsRows: (False, True),
    KeepsNorm: (False, True),
    KeepsMatrices: (False, True),
    KeepsMaximum: (False, True),
    Noise: (False, True),
    UnseenNoise: (False, True),
    RoundsAtRandom: (False, True),
    NeedsClosure: (False, True),
    NeedsAccelerator: (False, True),
    NeedsRate: (False, True),
    ClipsAll: (False, False),
    ScalesByLargest: (False, False),
    Adapts: (False, False),
    Distance: (False, False),
    HiddenDistance: (False, False),
    SharedState: (True, False),
    MatricesTogether: (False, False),
    SameLbfgs: (False, False),
    SharpnessAware: (False, False),
    LooksAhead: (False, False),
    Averaging: (True, True),
    MatrixAveraging: (False, True),
    AveragesTogether: (False, False),
}
"""Optimizers unknown to the probe: whether each is element-wise, and whether it is separable."""
