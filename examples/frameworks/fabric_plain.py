"""A loop with Lightning Fabric on random numbers: accumulates, clips, saves, and resumes if there is a checkpoint."""

import logging
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn


def main() -> None:
    """Train to the step that the second argument says, with a checkpoint in the folder that the first one names."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if folder.exists():
        fabric.load(folder / "last.ckpt", state)
    for step in range(state["step"], steps):
        optimizer.zero_grad()
        for part in range(2):
            torch.manual_seed(100 * step + 10 * part + fabric.global_rank)
            inputs, targets = torch.randn(4, 8), torch.randn(4, 1)
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward(nn.functional.mse_loss(model(inputs), targets))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.save(folder / "last.ckpt", {**state, "step": steps})
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    fabric.print(f"sum of all weights {weights.double().abs().sum().item():.6f}")


if __name__ == "__main__":
    main()
