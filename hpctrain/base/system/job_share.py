"""What Slurm gave this process's job on this node: CPUs and memory. Many clusters do not confine a job to them."""

from __future__ import annotations

import os
from collections.abc import Mapping

MIB = 2**20


def usable_cpus(environ: Mapping[str, str] = os.environ, allowed: int | None = None) -> int:
    """Return the number of CPUs that this process may use: those that the kernel allows (cpuset, affinity), and no more
    than Slurm gave its job step on this node.

    Args:
        allowed: number of CPUs that the kernel allows; None: that of this process.
    """
    if allowed is None:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _number(environ, "SLURM_CPUS_ON_NODE") or allowed)


def job_memory_bytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the bytes of memory that Slurm gave this process's job on this node; None outside of a job, or if the job
    has all memory of the node."""
    per_cpu, cpus = _number(environ, "SLURM_MEM_PER_CPU"), _number(environ, "SLURM_CPUS_ON_NODE")
    per_gpu, gpus = _number(environ, "SLURM_MEM_PER_GPU"), _number(environ, "SLURM_GPUS_ON_NODE")
    mib = _number(environ, "SLURM_MEM_PER_NODE") or per_cpu * cpus or per_gpu * gpus
    return mib * MIB or None


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number in a variable; 0 if the variable is absent or holds no whole number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0
