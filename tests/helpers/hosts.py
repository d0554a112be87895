"""Two hosts on one machine, each a network namespace of its own, with a launcher of torchrun on each."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.network import Host, obstacle, shaped

ROOT = Path(__file__).parents[2]
RATE = "10gbit"
PORT = 29400  # of the meeting; each network has its own

needs_root = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


@contextmanager
def nobody_else_lays() -> Iterator[None]:
    """Whoever lays a network cleans up after the dead: one at a time, in whatever process."""
    with open(Path(tempfile.gettempdir(), "zerostep-network-tests.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def laid(count: int = 2) -> Iterator[list[Host]]:
    """Hosts with the addresses 10.0.0.1, 10.0.0.2, ...; removed on the way out."""
    network = shaped(count, RATE)
    with nobody_else_lays():
        hosts = network.__enter__()
    try:
        yield hosts
    finally:
        network.__exit__(None, None, None)


@dataclass(frozen=True)
class Launcher:
    """The torchrun of a host, and the file with what it and its ranks print."""

    process: "subprocess.Popen[bytes]"
    output: Path

    def ended(self, deadline: float) -> int:
        """Its exit status; fails with what it printed if it does not end in time."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.output.name} has not ended:\n{self.printed}") from None

    @property
    def printed(self) -> str:
        """What it and its ranks have printed."""
        return self.output.read_text(errors="replace")


@contextmanager
def launcher(host: Host, place: int, nodes: str, output: Path, *program: str) -> Iterator[Launcher]:
    """Start torchrun with two ranks on a host; the first host holds the meeting.

    `ip netns exec` gives it a mount namespace of its own: no other host sees what its processes mount.
    """
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.0.0.1:{PORT}", "--local-addr", f"10.0.0.{place + 1}"),
        *("--rdzv-conf", f"is_host={int(place == 0)},last_call_timeout=5,keep_alive_interval=1"),
        *("--monitor-interval", "0.1", "--max-restarts", "3" if ":" in nodes else "0", *program),
    ]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*host.enter, *words], cwd=ROOT, env=environment(host), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield Launcher(process, output)
    finally:
        process.terminate()  # and not kill: the launcher ends its ranks
        process.wait()


def environment(host: Host) -> dict[str, str]:
    """For ranks of one thread, whose connections leave by the host's cable."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
