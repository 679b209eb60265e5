"""The CPUs of a machine, divided among the devices of a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpctrain.base.system.core_sets import core_set_environment, core_sets, overlap, parse_cpus

BARE: dict[str, str] = {}


def machine(folder: Path, domains: list[str], siblings: dict[int, str]) -> Path:
    """A sysfs with the CPU lists of NUMA domains, and the hardware threads of each CPU's core."""
    for index, cpus in enumerate(domains):
        file = folder / f"devices/system/node/node{index}/cpulist"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpus}\n")
    for cpu, threads in siblings.items():
        file = folder / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{threads}\n")
    return folder


@pytest.mark.parametrize(
    ("cpus", "count", "expected"),
    [
        (range(8), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (range(5), 2, [(0, 1), (2, 3, 4)]),
        ([3, 9], 2, [(3,), (9,)]),
        ([3, 9], 4, [(3,), (3,), (9,), (9,)]),
        ([3, 9], 3, [(3,), (3,), (9,)]),
        (range(4), 1, [(0, 1, 2, 3)]),
    ],
)
def test_cpus_are_divided_in_order_and_shared_if_they_are_too_few(
    cpus: Sequence[int], count: int, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    sets = core_sets(count, environ=BARE, allowed=cpus, sysfs=tmp_path)
    assert sets == expected
    assert overlap(sets) == (count > len(cpus))


def test_a_domain_and_the_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    # Two sockets whose CPUs are numbered in turn; CPUs 4 to 7 are the second threads of the cores of 0 to 3.
    pairs = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    sysfs = machine(tmp_path, ["0,2,4,6", "1,3,5,7"], pairs)
    assert core_sets(2, environ=BARE, allowed=range(8), sysfs=sysfs) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert core_sets(4, environ=BARE, allowed=range(8), sysfs=sysfs) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert core_sets(2, environ=BARE, allowed=[0, 1, 4, 5], sysfs=sysfs) == [(0, 4), (1, 5)]


def test_domain_10_comes_after_domain_2(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, [str(10 - index) for index in range(11)], {})
    assert core_sets(11, environ=BARE, allowed=range(11), sysfs=sysfs) == [(10 - index,) for index in range(11)]


def test_virtual_nodes_get_different_cpus(tmp_path: Path) -> None:
    nodes = [core_sets(2, node, 2, environ=BARE, allowed=range(8), sysfs=tmp_path) for node in range(2)]
    assert nodes == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    few = [core_sets(2, node, 2, environ=BARE, allowed=range(2), sysfs=tmp_path) for node in range(2)]
    assert few == [[(0,), (0,)], [(1,), (1,)]]


def test_nobody_is_pinned_where_slurm_does_not_confine_a_job_to_its_cpus(tmp_path: Path) -> None:
    sets = core_sets(2, environ={"SLURM_CPUS_ON_NODE": "4"}, allowed=range(8), sysfs=tmp_path)
    assert sets == []
    assert core_sets(2, environ={"SLURM_CPUS_ON_NODE": "8"}, allowed=range(8), sysfs=tmp_path) != []
    assert core_set_environment(2, sets, {"OMP_NUM_THREADS": "3"}) == {}
    usable = len(os.sched_getaffinity(0))
    assert core_set_environment(2, sets, BARE) == {"OMP_NUM_THREADS": str(max(1, usable // 2))}


@pytest.mark.parametrize(("given", "threads"), [({}, 2), ({"OMP_NUM_THREADS": "1"}, 1), ({"OMP_NUM_THREADS": "9"}, 2)])
def test_a_process_takes_its_set_and_no_more_threads_than_the_set_has_cpus(given: dict[str, str], threads: int) -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("a machine of one CPU has no sets to take")
    env = core_set_environment(2, [tuple(mine[:1]), tuple(mine[:2])], given)
    words = "import os; from hpctrain.base.system.core_sets import take_core_set; take_core_set(1); "
    words += "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    bare = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    printed = subprocess.run(
        [sys.executable, "-c", words], env=bare | given | env, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == f"{mine[:2]} {threads}"


@pytest.mark.parametrize("text", ["x", "1-", "0;1"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: numbers of CPUs"):
        parse_cpus(text)
