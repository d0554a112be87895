"""What numbers depend on besides the code: versions and hardware."""

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("zerostep", "torch", "deepspeed", "fairscale")
_PROCESSOR = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def hardware() -> dict[str, str]:
    """Return the processor, the number of cores and the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": _processor(), "cores": str(os.cpu_count()), "memory": f"{memory:.0f} GiB"}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    lines = _PROCESSOR.read_text().splitlines() if _PROCESSOR.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
