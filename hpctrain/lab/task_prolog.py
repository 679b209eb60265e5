"""The lab's TaskProlog: slurmd runs it before each task and puts its `export` lines into the task's environment.

The nodes of a lab share this machine's cores, and each node sees all of them. Without this script every worker would
start as many threads as there are cores. Waiting threads spin, so that steps would take many times as long.
"""

from __future__ import annotations

from hpctrain.lab.layout import LabLayout

_SCRIPT = """\
#!/bin/sh
# {words}. A value of your own in the job's environment counts more.
[ -n "$OMP_NUM_THREADS" ] || echo "export OMP_NUM_THREADS={threads}"
"""


def threads_of(layout: LabLayout, cores: int) -> int:
    """Return the number of threads of a task: a node's equal share of this machine's cores, at least one."""
    return max(1, cores // len(layout.names))


def threads_words(layout: LabLayout, cores: int) -> str:
    """Return a line about the threads of a task: 'OMP_NUM_THREADS=1 in each task: 4 nodes share 2 cores'."""
    nodes, many = len(layout.names), "" if len(layout.names) == 1 else "s"
    share = "shares" if nodes == 1 else "share"
    return f"OMP_NUM_THREADS={threads_of(layout, cores)} in each task: {nodes} node{many} {share} {cores} cores"


def task_prolog(layout: LabLayout, cores: int) -> str:
    """Return the text of the TaskProlog script."""
    return _SCRIPT.format(words=threads_words(layout, cores), threads=threads_of(layout, cores))
