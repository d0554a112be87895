"""Two replicas of a model, each divided over the other ranks by tensor and sequence parallelism.

`torchrun --nproc-per-node 4` makes a mesh of 2x2. With two ranks nothing is divided but the optimizer's state, and the
numbers are the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from common import batches, mean, say, start
from zerostep import ShardedOptimizer

STEPS, WIDTH, LAYERS = 20, 64, 2


class Layer(nn.Module):
    """A norm and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the layer finds."""
        result: Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return result


class Bytes(nn.Module):
    """Predicts each byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, window: Tensor) -> Tensor:
        """The loss of a batch."""
        logits = self.head(self.layers(self.words(window[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


# Between the layers each rank has a part of the sequence; inside of them, a part of the matrices.
layer = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
plan = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    **{f"layers.{number}.{name}": style for number in range(LAYERS) for name, style in layer.items()},
}

device = start()
mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = parallelize_module(Bytes().to(device), mesh["tp"], plan)
optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=3e-3, process_group=mesh["dp"])

# All ranks of one replica get the same batch.
for window in batches(STEPS, device, replica=mesh.get_local_rank("dp")):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()
    norm = optimizer.clip_grad_norm_(1.0)  # of the whole model, each element of it once
    optimizer.step()

state = optimizer.stats().state_bytes
say(f"mesh {tuple(mesh.shape)}: loss {mean(loss):.4f}, norm {norm.item():.4f}, {state} bytes of state on rank 0")
dist.destroy_process_group()
