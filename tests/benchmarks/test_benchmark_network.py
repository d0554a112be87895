"""Network namespaces of benchmarks are removed, however the benchmark ends."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network import NetworkError, obstacle, shaped
from tests.helpers.hosts import needs_root, nobody_else_lays

ROOT = Path(__file__).parents[2]
# A shell that starts its commands in the background has them ignore SIGINT, and so would this one.
LINGER = """
import signal, time
from benchmarks.network import shaped
signal.signal(signal.SIGINT, signal.default_int_handler)
with shaped(2, "1gbit"):
    print("laid", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nobody removes what these tests leave behind on purpose."""
    with nobody_else_lays():
        yield


def of(process: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"zerostep-{process}-*")]


def lingering() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", LINGER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "laid\n"
    assert len(of(process.pid)) == 3
    return process


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_takes_the_namespaces_along(number: signal.Signals) -> None:
    process = lingering()
    process.send_signal(number)
    assert process.wait(30) != 0
    assert of(process.pid) == []


@needs_root
def test_what_a_killed_run_left_goes_when_the_next_starts() -> None:
    process = lingering()
    process.kill()
    process.wait(30)
    assert len(of(process.pid)) == 3
    with shaped(1, "1gbit"):
        assert of(process.pid) == []


@needs_root
def test_a_network_is_bounded() -> None:
    with pytest.raises(NetworkError, match="between 1 and 64 hosts, not 65"), shaped(65, "1gbit"):
        pass


def test_without_root_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(NetworkError, match="takes root"), shaped(2, "1gbit"):
        pass
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "install iproute2" in str(obstacle())
