"""A library in the place of the driver's NVML, with recorded answers (nvml.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_name("nvml.c")


def build_nvml(folder: Path) -> str:
    """Compile the library into a folder, and return its path. Skip the test without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(path), str(SOURCE)], check=True)
    return str(path)


def load_nvml(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Put the library at `path` in the place of the driver's."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(path))
