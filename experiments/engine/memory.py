"""Memory of the machine, and of processes that are started."""

from __future__ import annotations

import math
import os
import pathlib

TUNABLES = "GLIBC_TUNABLES"
LARGE_PAGES = "glibc.malloc.hugetlb=1"


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


def with_large_pages() -> dict[str, str]:
    """The environment for a process whose memory comes in large pages, where the system gives them.

    Fresh small pages are a fifth of the time of a training step. A setting of the user's own goes before.
    """
    return {TUNABLES: LARGE_PAGES, **os.environ}
