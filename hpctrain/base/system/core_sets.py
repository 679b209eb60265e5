"""The core sets of a node: the CPUs of a job on this machine, divided among several devices.

The process of a device is pinned to its core set, and has as many threads as the set has CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ClusterShell.RangeSet import RangeSet, RangeSetParseError

from hpctrain.base.system.job_share import usable_cpus
from hpctrain.base.system.kernel import kernel_text

CORE_SETS = "HPCTRAIN_CORE_SETS"
"""Environment variable with the core sets of a node's devices, in the order of the devices: 0-3;4-7."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of a process."""
SYSFS = Path("/sys")

CoreSet = tuple[int, ...]
"""Numbers of the CPUs of one device."""


def core_sets(
    count: int, node: int = 0, nodes: int = 1, environ: Mapping[str, str] = os.environ,
    allowed: Iterable[int] | None = None, sysfs: Path = SYSFS,
) -> list[CoreSet]:  # fmt: skip
    """Return the core sets of the `count` devices of a node. Empty if Slurm gave the job fewer CPUs than the kernel
    allows, because nobody knows then which CPUs are the job's.

    The CPUs that this process may use are divided in order: hardware threads of one core, and cores of one NUMA domain,
    are neighbours. The sizes of the sets differ by at most one CPU. With fewer CPUs than devices, several devices have
    the same CPU.

    Args:
        node: number of the virtual node on this machine.
        nodes: number of virtual nodes that share this machine; each gets its part of the CPUs.
        environ: environment variables of the job step.
        allowed: numbers of the CPUs that this process may use; None: its affinity.
        sysfs: where the kernel's sysfs is mounted.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    if usable_cpus(environ, len(usable)) < len(usable):
        return []
    cpus, parts = _by_neighbourhood(usable, sysfs), count * nodes
    bounds = [len(cpus) * part // parts for part in range(parts + 1)]
    of_node = range(node * count, (node + 1) * count)
    return [tuple(sorted(cpus[bounds[part] : max(bounds[part + 1], bounds[part] + 1)])) for part in of_node]


def overlap(sets: Sequence[CoreSet]) -> bool:
    """Return whether two of the core sets have a CPU in common."""
    return len({cpu for cpus in sets for cpu in cpus}) < sum(len(cpus) for cpus in sets)


def core_set_environment(count: int, sets: Sequence[CoreSet], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which each process of a node's `count` devices learns its CPUs (`take_core_set`).

    Args:
        sets: the core sets; empty if they are not known. The processes then share all CPUs, and the variables give each
            an equal share of the threads, unless `environ` has a number of threads.
        environ: environment variables of the processes.
    """
    if count < 2:
        return {}
    if sets:
        return {CORE_SETS: ";".join(str(RangeSet.fromlist([str(cpu) for cpu in cpus])) for cpus in sets)}
    return {} if environ.get(THREADS) else {THREADS: str(max(1, usable_cpus(environ) // count))}


def take_core_set(index: int) -> None:
    """Pin this thread, and all threads that it starts from now on, to the core set of the device `index`; set the
    environment variable OMP_NUM_THREADS to the size of the set, unless it has a smaller value. Without core sets in the
    environment, do nothing.

    Raises:
        ValueError: the environment variable HPCTRAIN_CORE_SETS has no core sets in the form of `CORE_SETS`.
        IndexError: HPCTRAIN_CORE_SETS has no set for the device `index`.
        OSError: this process may not use these CPUs.
    """
    text = os.environ.get(CORE_SETS)
    if text is None:
        return
    cpus = parse_cpus(text.split(";")[index])
    os.sched_setaffinity(0, cpus)
    os.environ[THREADS] = str(min(len(cpus), int(os.environ.get(THREADS) or len(cpus))))


def parse_cpus(text: str) -> list[int]:
    """Return the numbers of the CPUs in a text of the kernel's form, such as 0-3,8.

    Raises:
        ValueError: the text has another form.
    """
    try:
        return [int(cpu) for cpu in RangeSet(text).intiter()]
    except RangeSetParseError as error:
        raise ValueError(f"found {text!r}; allowed: numbers of CPUs, as 0-3,8") from error


def _by_neighbourhood(cpus: set[int], sysfs: Path) -> list[int]:
    """Return the CPUs by NUMA domain, then by core; in the order of their numbers where /sys does not tell."""
    domains = {cpu: index for index, domain in enumerate(_domains(sysfs)) for cpu in domain}

    def core(cpu: int) -> int:
        return min(_listed(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), default=cpu)

    return sorted(cpus, key=lambda cpu: (domains.get(cpu, len(domains)), core(cpu), cpu))


def _domains(sysfs: Path) -> Iterator[list[int]]:
    folders = sysfs.glob("devices/system/node/node[0-9]*")
    for folder in sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
        yield _listed(folder / "cpulist")


def _listed(file: Path) -> list[int]:
    try:
        return parse_cpus(kernel_text(file) or "")
    except ValueError:
        return []
