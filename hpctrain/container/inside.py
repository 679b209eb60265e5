"""A program that prints what a Python inside an image sees, as one JSON object.

It is started by its path and imports nothing of hpctrain, because packages that hpctrain needs may be missing in the
image.

usage:
    python3 inside.py look PACKAGE...    versions of these packages, devices and folders
    python3 inside.py signals            the signals that arrive: it waits for SIGTERM and SIGUSR2
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAIT_S = 10.0


def look(packages: list[str]) -> dict[str, Any]:
    """Return versions, devices and folders as seen inside the image, for `hpctrain image check`.

    The keys: `python`, its version; `packages`, name -> version or None; `torch`, versions and backends of torch, or
    its `error`; `infiniband`, names of device files; `nvidia`, whether NVIDIA's control device is there; `home`,
    `temporary` and `shared_memory`, why no file can be created in this folder, or None.

    Args:
        packages: names of packages whose versions are wanted.
    """
    infiniband = Path("/dev/infiniband")
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: _version(name) for name in packages},
        "torch": _torch(),
        "infiniband": sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else [],
        "nvidia": Path("/dev/nvidiactl").exists(),
        "home": _why_not_writable(os.environ.get("HOME", "/")),
        "temporary": _why_not_writable(tempfile.gettempdir()),
        "shared_memory": _why_not_writable("/dev/shm"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
    except Exception as error:  # importing a library may fail in any way
        first = str(error).partition("\n")[0]
        return {"error": f"{type(error).__name__}: {first}"}
    there = distributed.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if there and distributed.is_nccl_available() else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gloo": there and distributed.is_gloo_available(),
        "nccl": nccl,
        "devices": torch.cuda.device_count(),
    }


def _why_not_writable(folder: str) -> str | None:
    """Return why no file can be created in the folder; None if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def signals() -> dict[str, Any]:
    """Print "ready", wait for SIGTERM and SIGUSR2, at most WAIT_S seconds, read from the image again, and return
    {'came': names of the signals that arrived, sorted}."""
    came: set[str] = set()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda got, _: came.add(signal.Signals(got).name))
    print("ready", flush=True)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and len(came) < 2:
        time.sleep(0.05)
    time.sleep(0.3)  # the process that serves the image's files got these signals too
    importlib.import_module("wave")  # a file of the image that was not read before
    return {"came": sorted(came)}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[2:]) if sys.argv[1] == "look" else signals()), flush=True)
