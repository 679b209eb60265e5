"""Read the version of this machine's GPU driver from the file of the loaded kernel module."""

from __future__ import annotations

from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")


def local_driver_version(node: str | None, file: Path = VERSION_FILE) -> dict[str, str]:
    """Return {node: version} of this machine's NVIDIA driver; {} if `node` is None or no such driver is loaded."""
    if node is None:
        return {}
    try:
        version = parse_driver_version(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    return {} if version is None else {node: version}


def parse_driver_version(text: str) -> str | None:
    """Return the version in a line such as 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  …'; None if the
    text has none."""
    for word in text.partition("\n")[0].split():
        parts = word.split(".")
        if len(parts) >= 2 and all(part.isdecimal() for part in parts):
            return word
    return None
