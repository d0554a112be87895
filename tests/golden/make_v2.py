"""Write the golden checkpoint of format version 2: `python -m tests.golden.make_v2 DIRECTORY`, once and never again.

It is of a mesh of two data-parallel and two tensor-parallel ranks. The directory gets `checkpoint`, and `values.json`
with what is in it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

import zerostep
from tests.golden.mesh_training import PLACEMENTS, everything, make, train

STEPS = 3
EXTRA = {"epoch": 2, "order": [3, 1, 2], "note": "golden"}


def _work(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{root}/store", 4), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = make(mesh["dp"], mesh["tp"], PLACEMENTS)
    train(model, optimizer, STEPS)
    zerostep.save(root / "checkpoint", optimizer, model, extra=EXTRA)
    found = everything(model, optimizer)
    if rank == 0:
        (root / "values.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True)
    start_processes(_work, (target,), nprocs=4, start_method="spawn")
    (target / "store").unlink(missing_ok=True)
