"""How much memory this worker has taken."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> float:
    """Peak memory of this worker: allocated on its CUDA device, or resident.

    The resident peak is the kernel's own of this process (proc(5), VmHWM): that of getrusage(2) starts with what the
    process that started this one held.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux tells every process its own peak"
    return float(found[1]) * 1024
