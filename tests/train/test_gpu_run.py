"""A run on real GPUs: each virtual node has its own, and the plan says so."""

from __future__ import annotations

import pytest
from test_recovery import finish
from test_recovery_memory import second_start
from train_site import CPU_ONLY, Site, kill_worker, once_there, wait_for_step, worker_of

from hpctrain.probe.system.gpu import machine_gpus
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology

pytestmark = [pytest.mark.slow, pytest.mark.requires("cuda")]
ALL_GPUS = {name: ",".join(machine_gpus()) for name in CPU_ONLY}


def test_a_virtual_node_trains_on_a_gpu(site: Site) -> None:
    done = site.train("run.yaml", "--local", "1", env=ALL_GPUS)
    assert done.folder is not None, done.said
    assert done.code == 0, done.said
    topology = Topology.read(done.folder / "topology.json")
    assert {topology.device_types[device.type].kind for device in topology.nodes[0].devices} == {"cuda"}
    plan = Plan.read(done.folder / "plan.json")
    assert {rank.device[:4] for rank in plan.ranks} == {"cuda"}


def test_a_killed_gpu_worker_goes_on_from_its_snapshot(site: Site) -> None:
    known = set((site.path / "runs").glob("*"))
    extra = ("--set", "steps=200", "--set", "checkpoint.every=1000", "--set", "recovery.snapshot_every=2")
    process = site.start("train", "run.yaml", "--local", "1", *extra, env=ALL_GPUS)
    folder = site.run_folder(known)
    once_there(worker_of, folder, "local0")
    wait_for_step(folder, 20)
    kill_worker(folder, "local0")
    outcome = finish(process, folder)
    start = second_start(outcome)
    assert start.data["memory"]["step"] >= 16
    assert start.data["lost_steps"] <= 3


def test_more_virtual_nodes_than_gpus_train_on_the_cpu_and_say_so(site: Site) -> None:
    count = len(machine_gpus()) + 1
    done = site.train("run.yaml", "--local", str(count), "--set", "steps=2", env=ALL_GPUS)
    assert done.folder is not None, done.said
    assert f"for {count} virtual nodes: all nodes run on the CPU" in done.said
    assert {rank.device for rank in Plan.read(done.folder / "plan.json").ranks} == {"cpu0"}
