"""Jobs on local ranks: over Gloo, or over NCCL with a GPU for each."""

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

__all__ = ["DemoError", "run_ranks"]

_TIMEOUT = timedelta(minutes=2)
_GLANCE = 0.1  # seconds between two looks at what a job tells


class DemoError(RuntimeError):
    """The demonstration cannot run; the message is one line for the user."""

    def format_message(self) -> str:
        """The one line, for a command line."""
        return str(self)


def run_ranks(
    job: Callable[..., object],
    ranks: int,
    *arguments: object,
    device: str = "cpu",
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """Run ``job(*arguments)`` on local ranks of one thread each; return what each returned, passed on as JSON.

    On ``"cuda"`` every rank has the GPU of its number. ``watch`` is called now and then while they run.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            running = spawn(_rank_main, (job, ranks, folder, device, arguments), nprocs=ranks, join=False)
            while not running.join(_GLANCE):
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
    meeting, gpu = Path(folder, "store").as_uri(), None
    if device == "cuda":
        gpu = torch.device("cuda", rank)
        torch.cuda.set_device(gpu)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # or two runs of one way would differ
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, meeting, timeout=_TIMEOUT, world_size=ranks, rank=rank, device_id=gpu)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(job(*arguments)))
    finally:
        dist.destroy_process_group()
