"""Peak memory of a worker."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> float:
    """Return the peak memory of this worker in bytes: allocated on its CUDA device, or resident on a CPU.

    The resident peak is VmHWM of proc(5), because the peak of getrusage(2) begins with that of the parent process.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None, "Linux tells every process its own peak"
    return float(peak[1]) * 1024
