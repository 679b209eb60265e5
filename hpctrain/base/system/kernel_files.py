"""Reads files of the kernel (/proc, /sys) with one value each. A result of None means that the file does not exist, may
not be read, or is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def kernel_text(file: Path) -> str | None:
    """Return the content of the file without white space at both ends; None if it cannot be read or is empty."""
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def kernel_number(file: Path) -> int | None:
    """Return the whole number in the file; None if it cannot be read, is empty, or holds a word such as "max"."""
    try:
        return int(kernel_text(file) or "")
    except ValueError:
        return None


def cgroup_folders(controller: str, process: Path, mount: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders that limit this process, its cgroup before the parents, each with the version of cgroups.

    Args:
        controller: what is limited, as cgroup v1 names it: cpu, memory.
        process: the process's /proc/self/cgroup.
        mount: where cgroups are mounted: /sys/fs/cgroup.
    """
    for line in (kernel_text(process) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == root:
                break
