"""A loop with Ray Train on random numbers: clips, reports a checkpoint, and resumes if there is one."""

import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import zerostep


def train(config: dict[str, int]) -> None:
    """Be one worker: train to the step that is given."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = zerostep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    rank, done, checkpoint = ray.train.get_context().get_world_rank(), 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "last.pt"), weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step in range(done, config["steps"]):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    optimizer.consolidate_state_dict()
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": config["steps"]}
            torch.save(saved, Path(folder, "last.pt"))
        found = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"sum": weights.double().abs().sum().item()}, checkpoint=found)


def main() -> None:
    """Train to the step that the second argument says, with checkpoints in the folder that the first one names."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    run = ray.train.RunConfig(name="example", storage_path=str(Path(sys.argv[1]).resolve()))
    workers, gloo = ray.train.ScalingConfig(num_workers=2), TorchConfig(backend="gloo")
    steps = {"steps": int(sys.argv[2])}
    result = TorchTrainer(
        train, train_loop_config=steps, scaling_config=workers, torch_config=gloo, run_config=run
    ).fit()
    print(f"sum of all weights {result.metrics['sum']:.6f}")


if __name__ == "__main__":
    main()
