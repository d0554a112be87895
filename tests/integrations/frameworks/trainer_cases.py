"""A program for ranks: what `test_trainer.py` compares. Each case trains a stock Trainer, plain and sharded.

The first argument is the folder for results, the second names the cases: `train`, `resume` (from what `train` has
saved) or `forgotten` (without the line that enables saving).
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import Trainer, TrainerCallback, TrainingArguments

import zerostep
from tests.integrations.frameworks.launch import error_of, report, still_there
from tests.integrations.frameworks.tiny import Tokens, difference, model, weights

FOLDER = Path(sys.argv[1])
CLASSES: dict[str, Any] = {
    "sharded": zerostep.ShardedOptimizer,
    "zero": zerostep.ZeroRedundancyOptimizer,
    "overlap": zerostep.ZeroRedundancyOptimizer,
}
MAIN = ("sharded", "zero")
STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "train": {"max_grad_norm": 0.0},
    "clip": {"max_grad_norm": 0.05},
    "accumulate": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2},
    "bf16": {"max_grad_norm": 0.0, "bf16": True},
}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}


class RegisterHook(TrainerCallback):
    """Makes the optimizer a part of DDP's hook, once Trainer has wrapped the model."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Register the hook."""
        ddp, optimizer = self.trainer.model_wrapped, self.trainer.optimizer.optimizer
        ddp.register_comm_hook(None, zerostep.hook_with_zero_step_interleaved(allreduce_hook, ddp, optimizer))


def trainer(
    kind: str, name: str, module: nn.Module | None = None, torch_format: bool = False, **options: Any
) -> Trainer:
    """Return a Trainer with the plain optimizer or a sharded one, which saves into a folder of that name."""
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "optim": "adamw_torch",
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    } | options
    made = TrainingArguments(str(FOLDER / name), **arguments)
    built = Trainer(model=module or model(), args=made, train_dataset=Tokens(), eval_dataset=Tokens(8, 2))
    if kind != "plain":
        how = {"overlap_with_ddp": True} if kind == "overlap" else {}
        zerostep.integrations.transformers.enable(built, CLASSES[kind], torch_format=torch_format, **how)
    if kind == "overlap" and dist.is_initialized():
        built.add_callback(RegisterHook(built))
    return built


@cache
def trained(kind: str, options: str) -> Tensor:
    """Return the weights after training."""
    each = trainer(kind, f"{kind}-{options}", **OPTIONS[options])
    each.train()
    assert kind == "plain" or isinstance(each.optimizer.optimizer, CLASSES[kind])
    found = weights(each.model)
    assert difference(found, weights(model())) > 1e-3
    return found


def compare(kind: str, options: str) -> float:
    return difference(trained(kind, options), trained("plain", options))


def resume(kind: str) -> list[float]:
    """Save at each second step, then go on from the first checkpoint, over the second one.

    Return the differences to plain training, of the first and of the resumed run.
    """
    first = trainer(kind, f"{kind}-saved", **SAVING)
    first.train()
    second = trainer(kind, f"{kind}-saved", model(seed=9), **SAVING)
    second.train(resume_from_checkpoint=str(FOLDER / f"{kind}-saved" / "checkpoint-2"))
    return [difference(weights(each.model), trained("plain", "train")) for each in (first, second)]


def torch_format(kind: str) -> list[Any]:
    """Save `optimizer.pt`; resume from it, sharded and plain. Return the names of the files and the differences."""
    name = f"{kind}-torch"
    trainer(kind, name, torch_format=True, **SAVING).train()
    checkpoint = FOLDER / name / "checkpoint-2"
    files = sorted(path.name for path in checkpoint.iterdir() if path.name.startswith("optimizer"))
    results: list[Any] = [files]
    for other in (kind, "plain"):
        resumed = trainer(other, f"{name}-{other}", model(seed=9), max_grad_norm=0.0)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        results.append(difference(weights(resumed.model), trained("plain", "train")))
    return results


def best(kind: str) -> list[str]:
    """Keep the best checkpoint alone, and load it at the end. Return the names of the checkpoints."""
    name = f"{kind}-best"
    each = trainer(
        kind,
        name,
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_total_limit=1,
    )
    each.train()
    kept = sorted(path.name for path in (FOLDER / name).iterdir())
    dist.barrier()
    again = trainer(kind, name, model(seed=9), max_steps=STEPS + 1)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS + 1
    return kept


def epochs(kind: str) -> list[list[str]]:
    """Save weights alone after each epoch. Return what each checkpoint has of the optimizer, and all weights' names."""
    name = f"{kind}-epochs"
    each = trainer(kind, name, save_strategy="epoch", save_only_model=True, max_steps=-1, num_train_epochs=2)
    each.train()
    dist.barrier()
    return [
        sorted(file.name for file in path.iterdir() if file.name.startswith("optimizer"))
        for path in sorted((FOLDER / name).iterdir())
    ]


def twice(kind: str) -> float:
    """Train a second time with the same Trainer; the difference to plain."""

    def run(which: str) -> Tensor:
        each = trainer(which, f"{which}-twice", max_steps=2)
        each.train()
        each.evaluate()
        each.train()
        return weights(each.model)

    return difference(run(kind), run("plain"))


def order_of_sums(kind: str) -> list[float]:
    """Large steps with more than two ranks; the largest differences to plain training, of key biases and of the rest.

    A bias of attention's keys has no influence on the loss: its gradient is what rounding leaves of zero.
    """
    found = []
    for which in ("plain", kind):
        each = trainer(which, f"{which}-order", max_grad_norm=0.0, learning_rate=1e-2)
        each.train()
        found.append(dict(each.model.named_parameters()))
    plain, ours = found
    keys = 0.0
    for name in [name for name in plain if name.endswith("attn.c_attn.bias")]:
        third = len(plain[name]) // 3
        keys = max(keys, difference(ours[name].detach()[third:-third], plain[name].detach()[third:-third]))
        for side in (plain, ours):
            side[name].data[third:-third] = 0.0
    return [keys, max(difference(ours[name].detach(), plain[name].detach()) for name in plain)]


def teardown(kind: str) -> list[str]:
    """Train, and drop everything. Return the classes of what is still there."""
    each = trainer(kind, f"{kind}-teardown", max_steps=1, max_grad_norm=0.0)
    each.train()
    check = still_there([each.model, each.optimizer.optimizer])
    each.accelerator.free_memory()
    del each
    return check()


def resume_elsewhere(kind: str) -> float:
    """Go on with other ranks from a checkpoint of `resume`; the difference to plain training that does the same."""
    results = []
    for which in ("plain", kind):
        each = trainer(which, f"{which}-elsewhere", model(seed=9), max_steps=STEPS + 1, max_grad_norm=0.0)
        each.train(resume_from_checkpoint=str(FOLDER / f"{which}-saved" / "checkpoint-2"))
        results.append(weights(each.model))
    return difference(*results)


def save_plain() -> None:
    """A checkpoint of plain training, to compare with."""
    trainer("plain", "plain-saved", **SAVING).train()


def forgotten() -> None:
    """Save without the line that enables it."""
    module = model()
    built = TrainingArguments(
        str(FOLDER / "forgotten"), max_steps=2, save_steps=1, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    optimizer = zerostep.ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
    Trainer(model=module, args=built, train_dataset=Tokens(), optimizers=(optimizer, None)).train()


def cases(wanted: str) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    if wanted == "forgotten":
        return {"forgotten": forgotten}
    if wanted == "resume":
        world = int(TrainingArguments(str(FOLDER / "x"), use_cpu=True).world_size)
        found |= {f"{kind}-elsewhere-{world}": partial(resume_elsewhere, kind) for kind in CLASSES}
        return found | {f"{kind}-order_of_sums": partial(order_of_sums, kind) for kind in MAIN if world > 2}
    found["plain-saved"] = save_plain
    for kind in CLASSES:
        works = [options for options in OPTIONS if (kind, options) != ("overlap", "clip")]
        found |= {f"{kind}-{options}": partial(compare, kind, options) for options in works}
        cases = (resume, torch_format, best, epochs, twice) if kind in MAIN else (resume,)
        found |= {f"{kind}-{case.__name__}": partial(case, kind) for case in (*cases, teardown)}
    return found | {
        "overlap-clip": partial(error_of, partial(trained, "overlap", "clip"))
    }  # last: it leaves the ranks in the middle of a step


if __name__ == "__main__":
    made = TrainingArguments(str(FOLDER / "ranks"), use_cpu=True)  # starts the process group
    report(FOLDER, made.process_index, cases(sys.argv[2]))
