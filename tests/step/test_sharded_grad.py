"""`ShardedGradient`, the value of `.grad` after a reduction: operations it forwards to its parts, and refusals."""

import copy
import gc
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from zerostep.step.sharded_grad import ShardedGradient

FOREACH = pytest.mark.parametrize("foreach", [False, True, None])


class Keeper:
    """Holds whole gradients, and remembers what it was asked for."""

    def __init__(self, *gradients: Tensor) -> None:
        self.gradients = list(gradients)
        self.asked = list[str]()
        self.params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for index, param in enumerate(self.params):
            param.grad = ShardedGradient(param, index, ref(self))

    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        self.asked.append("norms")
        return [torch.linalg.vector_norm(self.gradients[index], norm_type) for index in params]

    def edit(self, params: Sequence[int], change: Callable[[Tensor], Any]) -> None:
        self.asked.append("edit")
        for index in params:
            change(self.gradients[index])

    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        self.asked.append("unscale")
        torch._amp_foreach_non_finite_check_and_unscale_([self.gradients[i] for i in params], found_inf, inverse)


def _keeper() -> Keeper:
    return Keeper(torch.tensor([[3.0, -4.0], [0.5, 0.0]]), torch.tensor([-12.0, 1.0, 0.25]))


def _plain(keeper: Keeper) -> list[nn.Parameter]:
    """The same gradients on ordinary parameters."""
    found = [nn.Parameter(torch.zeros_like(gradient)) for gradient in keeper.gradients]
    for param, gradient in zip(found, keeper.gradients, strict=True):
        param.grad = gradient.clone()
    return found


def _assert_like(keeper: Keeper, plain: Sequence[nn.Parameter]) -> None:
    for gradient, param, ours in zip(keeper.gradients, plain, keeper.params, strict=True):
        assert param.grad is not None and torch.equal(gradient, param.grad)
        assert isinstance(ours.grad, ShardedGradient)


# What gives the right answer.


@FOREACH
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_by_norm(foreach: bool | None, norm_type: float) -> None:
    keeper = _keeper()
    plain = _plain(keeper)
    expected = clip_grad_norm_(plain, 2.0, norm_type, foreach=foreach)
    assert torch.equal(clip_grad_norm_(keeper.params, 2.0, norm_type, foreach=foreach), expected)
    _assert_like(keeper, plain)
    assert set(keeper.asked) == {"norms", "edit"}


@FOREACH
def test_clipping_by_value(foreach: bool | None) -> None:
    keeper = _keeper()
    plain = _plain(keeper)
    clip_grad_value_(plain, 2.5, foreach=foreach)
    clip_grad_value_(keeper.params, 2.5, foreach=foreach)
    _assert_like(keeper, plain)


def test_the_total_norm() -> None:
    keeper = _keeper()
    grads = [param.grad for param in keeper.params if param.grad is not None]
    assert torch.equal(get_total_norm(grads), get_total_norm(keeper.gradients))


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_a_scaler_unscales_the_parts(bad: float | None) -> None:
    keeper = _keeper()
    if bad is not None:
        keeper.gradients[1][2] = bad
    plain, inner = _plain(keeper), torch.optim.SGD(keeper.params, lr=0.1)
    scaler, other = GradScaler("cpu", init_scale=4.0), GradScaler("cpu", init_scale=4.0)
    expected = torch.optim.SGD(plain, lr=0.1)
    for each, optimizer in ((scaler, inner), (other, expected)):
        each.scale(torch.ones(1))
        each.unscale_(optimizer)
    _assert_like_with_nan(keeper, plain)
    assert keeper.asked == ["unscale"]
    assert scaler._found_inf_per_device(inner) == other._found_inf_per_device(expected)


def _assert_like_with_nan(keeper: Keeper, plain: Sequence[nn.Parameter]) -> None:
    for gradient, param in zip(keeper.gradients, plain, strict=True):
        assert param.grad is not None and torch.equal(gradient.nan_to_num(77.0), param.grad.nan_to_num(77.0))


def test_setting_to_zero() -> None:
    keeper = _keeper()
    torch.optim.SGD(keeper.params[:1], lr=0.1).zero_grad(set_to_none=False)
    keeper.params[1].grad.zero_()  # type: ignore[union-attr]
    assert not any(gradient.any() for gradient in keeper.gradients)


def _times(grad: Tensor) -> None:
    grad *= 0.5


def _divided(grad: Tensor) -> None:
    grad /= 2


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.mul_(torch.tensor(0.5)),
        lambda grad: grad.div_(2),
        lambda grad: grad.div_(torch.tensor(2.0)),
        lambda grad: grad.clamp_(-1, 1),
        lambda grad: grad.clamp_(max=1),
        lambda grad: grad.clamp_(min=-1),
        lambda grad: torch._foreach_mul_([grad], 0.5),
        lambda grad: torch._foreach_div_([grad], 2.0),
        _times,
        _divided,
    ],
)
def test_scaling_element_by_element(change: Callable[[Tensor], Any]) -> None:
    keeper = _keeper()
    plain = _plain(keeper)
    for param in [*plain, *keeper.params]:
        assert param.grad is not None
        change(param.grad)
    _assert_like(keeper, plain)


def test_setting_to_none() -> None:
    keeper = _keeper()
    torch.optim.SGD(keeper.params, lr=0.1).zero_grad()
    assert [param.grad for param in keeper.params] == [None, None]
    assert keeper.asked == []


def test_setting_another_gradient() -> None:
    keeper = _keeper()
    keeper.params[0].grad = torch.ones(2, 2)
    assert type(keeper.params[0].grad) is Tensor


def test_what_autograd_adds_is_caught() -> None:
    keeper = _keeper()
    param, grad = keeper.params[0], keeper.params[0].grad
    assert isinstance(grad, ShardedGradient) and grad.take_arrived() is None
    seen = list[bool]()
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is grad))
    (3 * param).sum().backward()
    (4 * param).sum().backward()
    assert seen == [True, True] and param.grad is grad
    arrived = grad.take_arrived()
    assert arrived is not None and torch.equal(arrived, torch.full((2, 2), 7.0))
    assert grad.take_arrived() is None
    assert torch.equal(keeper.gradients[0], _keeper().gradients[0])


def test_what_autograd_adds_is_nobody_else_s_memory() -> None:
    """Two parameters are given the same tensor; what the one does with it must not reach the other."""
    keeper = _keeper()
    first, second = keeper.params[0], nn.Parameter(torch.zeros(2, 2))
    (first + second).sum().backward()
    assert second.grad is not None
    second.grad.mul_(100)
    arrived = first.grad.take_arrived()  # type: ignore[union-attr]
    assert torch.equal(arrived, torch.ones(2, 2))


def test_a_gradient_has_a_kind_but_no_memory() -> None:
    like = torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    grad = ShardedGradient(like, 0, ref(_keeper()))
    assert (grad.shape, grad.dtype, grad.device, grad.stride()) == (like.shape, like.dtype, like.device, like.stride())
    assert (grad.layout, grad.requires_grad, grad.numel(), len(grad)) == (torch.strided, False, 96, 2)
    assert grad.detach() is grad and grad.data_ptr() == 0


def test_printing_is_harmless() -> None:
    keeper = _keeper()
    grad = keeper.params[0].grad
    for text in (repr(grad), str(grad), f"{grad}", repr([grad])):
        assert "ShardedGradient(shape=(2, 2), dtype=torch.float32)" in text
    assert keeper.asked == []


def test_a_model_with_such_gradients_can_be_copied() -> None:
    keeper = _keeper()
    model = nn.ParameterList(keeper.params)
    twin = copy.deepcopy(model)
    assert all(param.grad is None for param in twin.parameters())


def test_the_optimizer_is_not_kept_alive() -> None:
    keeper = _keeper()
    param = keeper.params[0]
    del keeper
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone"):
        clip_grad_norm_([param], 1.0)


# Several optimizers, and gradients of the ordinary kind.


@FOREACH
def test_gradients_of_two_optimizers_are_clipped_together(foreach: bool | None) -> None:
    first, second = Keeper(torch.tensor([3.0])), Keeper(torch.tensor([4.0]))
    assert clip_grad_norm_([*first.params, *second.params], 1.0, foreach=foreach).item() == 5.0
    assert first.gradients[0].item() == pytest.approx(0.6)
    assert second.gradients[0].item() == pytest.approx(0.8)


def test_gradients_of_two_optimizers_are_unscaled_together() -> None:
    first, second = Keeper(torch.tensor([3.0])), Keeper(torch.tensor([4.0]))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([*first.params, *second.params], lr=0.1))
    assert (first.gradients[0].item(), second.gradients[0].item()) == (0.75, 1.0)


@FOREACH
@pytest.mark.parametrize("first", [True, False])
def test_ordinary_gradients_are_clipped_along(foreach: bool | None, first: bool) -> None:
    keeper, other = Keeper(torch.tensor([3.0])), nn.Parameter(torch.zeros(1))
    other.grad = torch.tensor([4.0])
    params = [other, *keeper.params] if first else [*keeper.params, other]
    assert clip_grad_norm_(params, 1.0, foreach=foreach).item() == 5.0
    assert keeper.gradients[0].item() == pytest.approx(0.6)
    assert other.grad.item() == pytest.approx(0.8)


def test_ordinary_gradients_are_unscaled_along() -> None:
    keeper, other = Keeper(torch.tensor([3.0])), nn.Parameter(torch.zeros(1))
    other.grad = torch.tensor([4.0])
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([other, *keeper.params], lr=0.1))
    assert (keeper.gradients[0].item(), other.grad.item()) == (0.75, 1.0)


# What is refused.

X = torch.ones(2, 2)


def _plus(grad: Tensor) -> None:
    grad += 1


def _set_item(grad: Tensor) -> None:
    grad[0] = 1.0


def _set_data(grad: Tensor) -> None:
    grad.data = X


REFUSED: dict[str, Callable[[Any], Any]] = {
    "add_": lambda grad: grad.add_(1),
    "add_ tensor": lambda grad: grad.add_(X),
    "+=": _plus,
    "+": lambda grad: grad + 1,
    "1 +": lambda grad: 1 + grad,
    "tensor +": lambda grad: X + grad,
    "tensor add_": lambda grad: X.clone().add_(grad),
    "torch.add": lambda grad: torch.add(grad, 1),
    "out=": lambda grad: torch.add(X, X, out=grad),
    "-": lambda grad: grad - 1,
    "*": lambda grad: grad * 2,
    "sub_": lambda grad: grad.sub_(X),
    "mul_ tensor": lambda grad: grad.mul_(X),
    "div_ tensor": lambda grad: grad.div_(X),
    "clamp_ tensor": lambda grad: grad.clamp_(X),
    "addcmul_": lambda grad: grad.addcmul_(X, X),
    "foreach_add_": lambda grad: torch._foreach_add_([grad], [X]),
    "foreach_mul_ tensors": lambda grad: torch._foreach_mul_([grad], [X]),
    "copy_": lambda grad: grad.copy_(X),
    "fill_": lambda grad: grad.fill_(1),
    "copy into": lambda grad: X.clone().copy_(grad),
    "norm": lambda grad: grad.norm(),
    "torch.norm": torch.norm,
    "norms along a dimension": lambda grad: torch.linalg.vector_norm(grad, dim=0),
    "sum": lambda grad: grad.sum(),
    "mean": lambda grad: grad.mean(),
    "max": lambda grad: grad.max(),
    "abs": lambda grad: grad.abs(),
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "==": lambda grad: grad == X,
    ">": lambda grad: grad > 0,
    "torch.equal": lambda grad: torch.equal(grad, X),
    "allclose": lambda grad: torch.allclose(grad, X),
    "in": lambda grad: 1.0 in grad,
    "bool": bool,
    "[0]": lambda grad: grad[0],
    "[0] =": _set_item,
    "iteration": list,
    "view": lambda grad: grad.view(-1),
    "reshape": lambda grad: grad.reshape(-1),
    "T": lambda grad: grad.T,
    "clone": lambda grad: grad.clone(),
    "double": lambda grad: grad.double().sum(),
    "stack": lambda grad: torch.stack([grad]),
    "torch.tensor": torch.tensor,
    "deepcopy": copy.deepcopy,
    "data": lambda grad: grad.data,
    "data =": _set_data,
    "item": lambda grad: grad.item(),
    "tolist": lambda grad: grad.tolist(),
    "numpy": lambda grad: grad.numpy(),
    "torch.save": lambda grad: torch.save(grad, io.BytesIO()),
    "pickle": pickle.dumps,
    "dlpack": lambda grad: grad.__dlpack__(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_with_the_remedy(name: str) -> None:
    keeper = _keeper()
    with pytest.raises((RuntimeError, TypeError)) as caught:
        REFUSED[name](keeper.params[0].grad)
    for text in ("each rank kept only the part it owns", "clip_grad_norm_()", 'reduction="all"', "tried: "):
        assert text in str(caught.value)
    assert keeper.asked == []
    assert torch.equal(keeper.gradients[0], _keeper().gradients[0])


def test_a_graph_of_gradients_is_refused() -> None:
    param = _keeper().params[0]
    with pytest.raises(RuntimeError, match='reduction="all"'), pytest.warns(UserWarning, match="create_graph"):
        (param * param).sum().backward(create_graph=True)
