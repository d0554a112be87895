"""Run a function on local ranks: over Gloo, or over NCCL with a GPU for each rank."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from zerostep.tools.errors import DemoError

_TIMEOUT = timedelta(minutes=2)
_POLL_SECONDS = 0.1


def run_ranks(
    job: Callable[..., object],
    ranks: int,
    *arguments: object,
    device: str = "cpu",
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """Run ``job(*arguments)`` on local ranks of one thread each; return each rank's result, which travels as JSON.

    On ``"cuda"`` rank r uses GPU r. ``watch`` is called in this process about ten times a second while they run.
    Raises `DemoError` if a rank fails; the others are stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            context = spawn(_rank_main, (job, ranks, folder, device, arguments), nprocs=ranks, join=False)
            while not context.join(_POLL_SECONDS):
                if watch is not None:
                    watch()
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise DemoError(f"rank {error.error_index} failed: {str(error).strip().splitlines()[-1]}") from error
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank_main(
    rank: int, job: Callable[..., object], ranks: int, folder: str, device: str, arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store, gpu = Path(folder, "store").as_uri(), None
    if device == "cuda":
        gpu = torch.device("cuda", rank)
        torch.cuda.set_device(gpu)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # or equal runs would differ in their last bits
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store, timeout=_TIMEOUT, world_size=ranks, rank=rank, device_id=gpu)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(job(*arguments)))
    finally:
        dist.destroy_process_group()
