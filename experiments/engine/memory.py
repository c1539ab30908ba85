"""Memory of the machine, and of processes that are started."""

from __future__ import annotations

import math
import os
import pathlib

TUNABLES = "GLIBC_TUNABLES"
MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    # Large pages; the largest pieces that glibc keeps by itself; and none of them goes back to the system at once.
    for name, value in {"hugetlb": 1, "mmap_threshold": 2**25, "trim_threshold": 2**30}.items()
)


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


def with_malloc() -> dict[str, str]:
    """The environment for a process whose memory comes in large pages, where the system gives them, and is kept.

    Fresh small pages are a fifth of the time of a training step. Whether glibc gives the scratch of XLA's loops back
    after each of them depends on what a process has freed before; where it does, a backward pass takes half as long
    again. A setting of the user's own goes before.
    """
    return {TUNABLES: MALLOC, **os.environ}
