"""Memory of the machine."""

from __future__ import annotations

import math
import os
import pathlib


def free_bytes() -> float:
    """Memory that can still be had; without limit where the system does not say."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (OSError, ValueError):
            return math.inf
