"""A pipeline of stages, in two replicas: each stage has an optimizer, which divides its state between its replicas.

`torchrun --nproc-per-node 4` makes two stages. With two ranks there is one, and the numbers are the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from common import batches, say, start
from zerostep import ShardedOptimizer

STEPS, WIDTH, LAYERS, MICRO_BATCHES = 20, 64, 4, 4


def whole() -> list[nn.Module]:
    """All layers, the same on every rank."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS - 2)]
    return [nn.Embedding(256, WIDTH), *inner, nn.Linear(WIDTH, 256)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


device = start()
mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
number, count = mesh.get_local_rank("pp"), mesh["pp"].size()
layers = LAYERS // count
model = nn.Sequential(*whole()[number * layers : (number + 1) * layers]).to(device)
stage = PipelineStage(model, number, count, device, group=mesh["pp"].get_group())
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=3e-3, process_group=mesh["dp"])

losses: list[Tensor] = []
for window in batches(STEPS, device, replica=mesh.get_local_rank("dp")):
    inputs = [window[:, :-1]] if number == 0 else []
    target = window[:, 1:].contiguous() if number == count - 1 else None
    optimizer.zero_grad()
    with optimizer.no_sync():  # gradients of all micro-batches add up; step() sends their sum
        schedule.step(*inputs, target=target, losses=losses)
    own = optimizer.grad_norm()  # of this stage
    total = own.square()
    dist.all_reduce(total, group=mesh["pp"].get_group())
    norm = total.sqrt()  # of the whole model
    optimizer.clip_grad_norm_(float(own / norm))  # every stage by the same factor, to a norm of 1 together
    optimizer.step()

loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
dist.all_reduce(loss)
state = optimizer.stats().state_bytes
say(f"stages {count}: loss {loss.item() / 2:.4f}, norm {norm.item():.4f}, {state} bytes of state on rank 0")
dist.destroy_process_group()
