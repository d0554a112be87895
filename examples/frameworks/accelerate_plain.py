"""A loop with Accelerate on random tokens: accumulates, clips, saves, and resumes if there is a checkpoint."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    """Train to the step that the second argument says, with a checkpoint in the folder that the first one names."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    loader = DataLoader(TensorDataset(torch.randint(64, (64, 16))), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    saved = len(list(folder.glob("save-*")))
    if saved:
        accelerator.load_state(str(folder / f"save-{saved}"))
    for number, (tokens,) in enumerate(loader):
        if not 4 * saved <= number < 2 * steps:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number % 4 == 3:  # after each second step
            accelerator.save_state(str(folder / f"save-{number // 4 + 1}"))
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    accelerator.print(f"sum of all weights {weights.double().abs().sum().item():.12f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
