"""Lightning's Trainer on random numbers: accumulates, clips, saves, and resumes if there is a checkpoint."""

import logging
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zerostep


class Module(lightning.LightningModule):
    """A small network and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return zerostep.ShardedOptimizer(self, torch.optim.AdamW, lr=1e-3)


def main() -> None:
    """Train to the step that the second argument says, with a checkpoint in the folder that the first one names."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(128, 8, generator=generator), torch.randn(128, 1, generator=generator))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)],
    )
    module, last = Module(), folder / "last.ckpt"
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        weights = torch.cat([param.detach().flatten() for param in module.parameters()])
        print(f"sum of all weights {weights.double().abs().sum().item():.6f}")


if __name__ == "__main__":
    main()
