"""Write the golden checkpoint of format version 1: `python -m tests.golden.make_v1 DIRECTORY`, once and never again.

The directory gets `checkpoint`, and `values.json` with what is in it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, ProcessGroup  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

import zerostep
from tests.golden.training import everything, make, train

STEPS = 3
EXTRA = {"epoch": 2, "order": [3, 1, 2], "note": "golden"}


def _work(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{root}/store", 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    model, optimizer = make(group)
    train(model, optimizer, STEPS)
    zerostep.save(root / "checkpoint", optimizer, model, extra=EXTRA)
    found = everything(model, optimizer)
    if rank == 0:
        (root / "values.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True)
    start_processes(_work, (target,), nprocs=2, start_method="spawn")
    (target / "store").unlink(missing_ok=True)
