"""A stock `Trainer` on random tokens: trains, saves, and resumes if there is a checkpoint."""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import zerostep


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every run."""

    def __init__(self) -> None:
        self.tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train for as many steps as the second argument says, with checkpoints in the folder that the first one names."""
    folder, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        weight_decay=0.1,
        optim="adamw_torch",
        save_steps=2,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    zerostep.integrations.transformers.enable(trainer)
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    if trainer.is_world_process_zero():
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        print(f"step {trainer.state.global_step}, sum of all weights {weights.double().abs().sum().item():.12f}")


if __name__ == "__main__":
    main()
