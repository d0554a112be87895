"""How far a call makes this process's resident memory grow. Linux only; elsewhere the answer is ``None``."""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def peak_growth(action: Callable[[], object]) -> int | None:
    """Run ``action`` and return the bytes by which resident memory at its peak exceeded that at the start."""
    before = _start()
    action()
    return None if before is None else _field("VmHWM") - before


class PeakWatch:
    """The highest point of resident memory in several calls, against the start; what lies between them is not seen."""

    def __init__(self) -> None:
        self._start = self._highest = _start()

    def run(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` and return what it returns."""
        if self._highest is None or not _reset():
            return action()
        found = action()
        self._highest = max(self._highest, _field("VmHWM"))
        return found

    @property
    def growth(self) -> int | None:
        """Bytes above the start."""
        return None if self._start is None or self._highest is None else self._highest - self._start


def _start() -> int | None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory the allocator kept from earlier rounds would hide growth
    return _field("VmRSS") if _reset() else None


def _reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
