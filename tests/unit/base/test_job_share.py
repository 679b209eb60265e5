"""What Slurm gave the job on this node, from its variables; a variable that is no number counts as none."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.system.job_share import job_memory_bytes, usable_cpus

ALLOWED = len(os.sched_getaffinity(0))


def test_a_job_has_the_cpus_that_slurm_gave_it_and_no_more_than_the_kernel_allows() -> None:
    assert usable_cpus({}) == ALLOWED
    assert usable_cpus({"SLURM_CPUS_ON_NODE": "1"}) == 1
    assert usable_cpus({"SLURM_CPUS_ON_NODE": str(ALLOWED + 7)}) == ALLOWED


def test_the_memory_of_a_job_is_per_node_per_cpu_or_per_gpu() -> None:
    assert job_memory_bytes({"SLURM_MEM_PER_NODE": "2048"}) == 2**31
    assert job_memory_bytes({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}) == 2**31
    assert job_memory_bytes({"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "2"}) == 2**31
    # --mem=0 is all memory of the node.
    assert job_memory_bytes({"SLURM_MEM_PER_NODE": "0", "SLURM_CPUS_ON_NODE": "4"}) is None
    assert job_memory_bytes({}) is None


@given(st.text(max_size=30))
def test_any_text_in_a_variable_is_survived(text: str) -> None:
    environ = dict.fromkeys(("SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"), text)
    assert 1 <= usable_cpus(environ) <= ALLOWED
    assert (job_memory_bytes(environ) or 1) > 0
