"""Fewer page table entries: what a fork costs most when much is preloaded.

A fork copies an entry for each page of 4 KiB; an area in huge pages has one for 2 MiB, and is split again only where
the fork writes. Best effort: Linux 6.1 or later, where transparent huge pages are not switched off.
"""

from __future__ import annotations

import ctypes

HUGE = 2 << 20
MADV_COLLAPSE = 25


def use_huge_pages() -> None:
    """Collapse this process's own memory, as far as it is aligned."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            found = areas(file.read())
    except OSError:
        return
    for start, size in found:
        madvise(start, size, MADV_COLLAPSE)


def areas(maps: str) -> list[tuple[int, int]]:
    """(address, size) of the aligned parts of private, writable memory without a file, from /proc/PID/maps."""
    found = []
    for line in maps.splitlines():
        where, rights, _, _, inode = line.split()[:5]
        name = line.split()[5:]
        if rights != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in where.split("-"))
        first, last = (start + HUGE - 1) // HUGE * HUGE, end // HUGE * HUGE
        if last > first:
            found.append((first, last - first))
    return found
