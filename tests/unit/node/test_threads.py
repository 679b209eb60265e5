"""The workers of a node share its cores."""

from __future__ import annotations

import pytest

from hpctrain.base.system.job_share import usable_cpus
from hpctrain.node.probe import NodeAddress
from hpctrain.node.worker_threads import share_environment, thread_environment
from hpctrain.records.topology.topology import Topology

HERE = NodeAddress("n0", ("n0", "n1"), "10.0.0.1", local=False)


def topology(devices: int, kind: str = "cuda") -> Topology:
    entries = [{"id": f"{kind}{index}", "type": "gpu"} for index in range(devices)]
    return Topology.from_json(
        {
            "provenance": {"version": "0", "created": "2099-01-01T00:00:00Z", "transport": "tcp", "loopback": False},
            "device_types": {"gpu": {"kind": kind, "name": "GPU"}},
            "nodes": [
                {"id": "n0", "addr": "10.0.0.1", "devices": entries},
                {"id": "n1", "addr": "10.0.0.2", "devices": []},
            ],
            "fabric": {"classes": []},
        }
    )


@pytest.mark.parametrize(
    ("devices", "cores", "env", "threads"),
    [
        (8, 64, {}, "8"),
        (8, 4, {}, "1"),
        (8, 64, {"OMP_NUM_THREADS": ""}, "8"),
        (8, 64, {"OMP_NUM_THREADS": "2"}, None),
        (1, 64, {}, None),
        (0, 64, {}, None),
    ],
)
def test_workers_share_the_cores_evenly_unless_somebody_chose(
    devices: int, cores: int, env: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    expected = {} if threads is None else {"OMP_NUM_THREADS": threads}
    assert thread_environment(topology(devices), HERE, env) == expected


@pytest.mark.parametrize(
    ("here", "sets"),
    [
        (HERE, "0-1;2-3"),
        (NodeAddress("n0", ("n0", "n1"), "127.0.0.1", local=True), "0;1"),
        (NodeAddress("n0", ("n1", "n0"), "127.0.0.1", local=True), "2;3"),
    ],
)
def test_workers_on_cpu_devices_get_core_sets_also_if_somebody_chose_threads(
    here: NodeAddress, sets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4))
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    assert thread_environment(topology(2, "cpu"), here, {"OMP_NUM_THREADS": "4"}) == {"HPCTRAIN_CORE_SETS": sets}
    assert thread_environment(topology(1, "cpu"), here, {}) == {}


def test_where_the_kernel_lets_a_job_use_the_neighbours_cores_its_processes_keep_to_their_own() -> None:
    allowed = usable_cpus({})
    assert share_environment({"SLURM_CPUS_ON_NODE": str(allowed)}) == {}
    assert share_environment({}) == {}
    if allowed == 1:
        pytest.skip("a machine of one core has no smaller part")
    assert share_environment({"SLURM_CPUS_ON_NODE": "1"}) == {"OMP_NUM_THREADS": "1"}
    assert share_environment({"SLURM_CPUS_ON_NODE": "1", "OMP_NUM_THREADS": "3"}) == {}
