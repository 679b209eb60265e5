"""What facts mean for a run: levels, the cost in words, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.doctor.cluster_findings import slurm_findings
from hpctrain.doctor.facts import (
    Driver,
    EnvironmentFacts,
    FolderFacts,
    HomeFacts,
    Interface,
    LocalDisk,
    MachineFacts,
    NetworkFacts,
    SlurmFacts,
    SlurmUnavailable,
    StoredPart,
    TorchFacts,
    TorchUnavailable,
    exit_code,
)
from hpctrain.doctor.findings import (
    container_findings,
    findings_of,
    folder_findings,
    network_findings,
    torch_findings,
)
from hpctrain.slurm.cluster import parse_config, parse_nodes, parse_partitions

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
CPU_TORCH = TorchFacts("2.13.0+cpu", None, True, None, ())
CUDA_TORCH = TorchFacts("2.13.0", "12.9", True, "2.27.3", ("NVIDIA H200",))
DRIVER = Driver(("NVIDIA H200",), "570.1")
RUNS = FolderFacts(Path("/home/anna/runs"), "nfs4", ("rw", "local_lock=none"), 2**40, True, "", "", "")
ETHERNET = Interface("eth0", "10.0.0.1", 10**10, False)
NETWORK = NetworkFacts((ETHERNET,), "gpu1", "eth0", known=("lo", "eth0"))
NO_SLURM = SlurmUnavailable(installed=False, configured=False)
VENV = EnvironmentFacts("venv", "3.11.7", (StoredPart("the environment", Path("/home/anna/venv"), "nfs4"),), ())
HOME = HomeFacts(Path("/home/anna"), "nfs4", 2**40, 10**7, None, ("PIP_CACHE_DIR", "HF_HOME"))
LAPTOP = MachineFacts(
    "laptop", NO_SLURM, {}, CPU_TORCH, None, replace(NETWORK, peer=None, chosen="lo"), RUNS, (), VENV, HOME
)


def captured(version: str) -> SlurmFacts:
    """A real cluster's answers."""
    texts = {name: (GOLDEN / version / f"{name}.txt").read_text() for name in ("config", "partitions", "nodes")}
    nodes = parse_nodes(texts["nodes"].partition("== idle\n")[2].partition("\n== ")[0])
    partitions = parse_partitions(texts["partitions"], nodes)
    return SlurmFacts(parse_config(texts["config"]), nodes, partitions, pyxis=False)


@pytest.fixture(params=["22.05.8", "24.11.5"])
def cluster(request):
    return captured(request.param)


def changed(cluster, **settings):
    return replace(cluster, config={**cluster.config, **settings})


def by_name(findings):
    named = {finding.name: finding for finding in findings}
    assert len(named) == len(findings)
    return named


def test_settings_of_a_real_cluster(cluster):
    found = by_name(slurm_findings(cluster))
    assert found["version"].value == cluster.config["version"]
    assert "agents notice within 5 s" in found["SlurmdTimeout"].words
    assert (found["cred_expire"].level, found["cred_expire"].value) == ("ok", "10 s")
    assert (found["PreemptType, PreemptMode"].level, found["PreemptType, PreemptMode"].value) == (
        "note",
        "partition_prio, REQUEUE",
    )
    assert "SIGUSR2" in found["send_user_signal"].words
    assert found["KillWait"].value == "5 s"
    assert found["MaxBatchRequeue"].value == "5"
    assert "any; the probe measures" in found["TopologyPlugin"].words
    assert (found["accounting"].level, found["accounting"].value) == ("note", "none")
    assert exit_code(slurm_findings(cluster)) == 0


@pytest.mark.parametrize(
    ("settings", "name", "level", "words"),
    [
        ({"cred_expire_s": 120}, "cred_expire", "note", "a requeue waits 120 s here"),
        ({"slurmd_timeout_s": 0}, "SlurmdTimeout", "note", "never gives up a silent node"),
        ({"preempt_mode": "CANCEL"}, "PreemptType, PreemptMode", "note", "does not bring them back"),
        ({"preempt_mode": "GANG,SUSPEND"}, "PreemptType, PreemptMode", "note", "stopped in place"),
        ({"preempt_send_user_signal": False}, "send_user_signal", "ok", "SIGTERM and no other notice"),
        ({"job_requeue": False}, "JobRequeue", "ok", "as hpctrain's do"),
        ({"over_time_limit_s": None}, "KillWait", "ok", "for ever over their limit"),
        ({"topology_plugin": "tree"}, "TopologyPlugin", "ok", "gives a job close ones"),
        ({"accounting": True}, "accounting", "ok", "sacct knows ended jobs"),
    ],
)
def test_each_setting_says_what_it_costs(cluster, settings, name, level, words):
    finding = by_name(slurm_findings(changed(cluster, **settings)))[name]
    assert finding.level == level
    assert words in finding.words


def test_without_preemption_nothing_is_said_of_its_signal(cluster):
    found = by_name(slurm_findings(changed(cluster, preempt_type="preempt/none", preempt_mode="OFF")))
    assert found["PreemptType, PreemptMode"].level == "ok"
    assert "send_user_signal" not in found
    assert "requeued" not in found["low (default)"].words


def test_partitions_of_a_real_cluster(cluster):
    found = by_name(slurm_findings(cluster))
    low, high, short = found["low (default)"], found["high"], found["short"]
    assert low.value == "3 nodes; 4 x a100 on 2 nodes, 8 x rtx4090 on 1 node"
    assert low.words.startswith("up to 2-00:00:00 (01:00:00 for a job that names no time)")
    assert "requeued for others, 8 s after the notice" in low.words
    assert high.words == "no time limit; at most 2 nodes a job; accounts physics, chem only"
    assert high.level == "ok"
    assert (short.level, "too short for a run" in short.words) == ("note", True)
    mig = [finding.value for finding in found.values() if "a100_3g.20gb" in finding.value]
    assert all("2 x a100_3g.20gb (MIG slices) on 1 node" in value for value in mig)
    assert mig


def test_a_preemption_without_grace_loses_steps(cluster):
    partitions = tuple(replace(partition, grace_s=0) for partition in cluster.partitions)
    low = by_name(slurm_findings(replace(cluster, partitions=partitions)))["low (default)"]
    assert (low.level, "at once (GraceTime 0)" in low.words) == ("note", True)


def test_nodes_out_of_service_are_counted(cluster):
    first, *rest = cluster.nodes
    nodes = (replace(first, states=frozenset({"IDLE", "DRAIN"})), *rest)
    assert by_name(slurm_findings(replace(cluster, nodes=nodes)))["low (default)"].value.startswith(
        "3 nodes, 1 out of service; "
    )


def test_a_cluster_where_nothing_starts_is_a_problem(cluster):
    down = replace(cluster, nodes=tuple(replace(node, states=frozenset({"DOWN"})) for node in cluster.nodes))
    found = by_name(slurm_findings(down))
    assert found["all"].level == "problem"
    assert "none of its nodes takes jobs now" in found["low (default)"].words
    closed = replace(cluster, partitions=tuple(replace(each, state="DOWN") for each in cluster.partitions))
    assert by_name(slurm_findings(closed))["all"].level == "problem"


@pytest.mark.parametrize(
    ("slurm", "level", "value"),
    [
        (NO_SLURM, "note", "not on the path"),
        (SlurmUnavailable(True, False, "Could not establish a configuration source"), "note", "not configured"),
        (SlurmUnavailable(True, True, "the Slurm controller is away"), "problem", "cannot be asked"),
    ],
)
def test_no_slurm_is_one_line(slurm, level, value):
    (finding,) = slurm_findings(slurm)
    assert (finding.level, finding.value) == (level, value)
    assert "hpctrain train --local N" in finding.words + finding.todo


def test_a_laptop_with_nothing_is_fine():
    findings = findings_of(LAPTOP)
    assert exit_code(findings) == 0
    assert [finding.subject for finding in findings if finding.level == "note"] == [
        "Slurm", "containers", "torch", "torch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("torch", "driver", "gpus", "name", "words"),
    [
        (TorchUnavailable("it is not installed", installed=False), None, 0, "torch", "no run can start"),
        (CPU_TORCH, DRIVER, 0, "torch", "leaves this machine's GPUs unused"),
        (CPU_TORCH, None, 12, "torch", "leaves the 12 GPUs that Slurm lists unused"),
        (replace(CUDA_TORCH, devices=()), DRIVER, 0, "torch", "so runs would train on CPUs"),
        (replace(CUDA_TORCH, nccl_version=None), DRIVER, 0, "NCCL", "could not talk to each other"),
        (replace(CPU_TORCH, gloo=False), None, 0, "gloo", "no run can start"),
    ],
)
def test_a_torch_that_cannot_do_its_work_is_a_problem(torch, driver, gpus, name, words):
    finding = by_name(torch_findings(torch, driver, gpus))[name]
    assert (finding.level, bool(finding.todo)) == ("problem", True)
    assert words in finding.words


def test_a_good_torch():
    found = by_name(torch_findings(CUDA_TORCH, DRIVER, 8))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["torch"].words == "can use 1 x NVIDIA H200"
    assert found["NCCL"].value == "2.27.3"
    # A login node has no GPU; those of the nodes are no concern of its own torch then.
    login = by_name(torch_findings(replace(CUDA_TORCH, devices=()), None, 8))
    assert login["torch"].level == "ok"
    rocm = replace(CUDA_TORCH, cuda_version=None, hip_version="6.4", devices=())
    assert by_name(torch_findings(rocm, None, 8))["torch"].level == "ok"
    assert by_name(torch_findings(rocm, DRIVER, 0))["torch"].level == "problem"


def test_containers():
    found = by_name(container_findings({"apptainer": "apptainer version 1.3.0"}, pyxis=True))
    assert found["apptainer"].value == "apptainer version 1.3.0"
    assert found["pyxis"].value == "present"
    broken = by_name(container_findings({"singularity": None}, pyxis=None))
    assert list(broken) == ["singularity"]
    assert broken["singularity"].level == "note"


def test_the_interface_that_leads_to_the_nodes_is_named():
    found = by_name(network_findings(NETWORK))
    assert (found["SOCKET_IFNAME"].value, found["SOCKET_IFNAME"].level) == ("eth0", "ok")
    assert "10 Gbit/s" in found["eth0"].words
    infiniband = by_name(
        network_findings(replace(NETWORK, interfaces=(replace(ETHERNET, name="ib0", infiniband=True),)))
    )
    assert "IP over InfiniBand" in infiniband["ib0"].words
    away = by_name(network_findings(replace(NETWORK, chosen=None, reason="gpu1: no route to this node")))
    assert (away["SOCKET_IFNAME"].level, "no route" in away["SOCKET_IFNAME"].words) == ("note", True)


@pytest.mark.parametrize(
    ("name", "value", "peer", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "gpu1", "note"),
        ("GLOO_SOCKET_IFNAME", "ib0", "gpu1", "note"),
        ("GLOO_SOCKET_IFNAME", "ib0", None, "problem"),
        ("GLOO_SOCKET_IFNAME", "lo,eth0", None, "note"),
        ("NCCL_SOCKET_IFNAME", "^docker", None, "note"),
    ],
)
def test_an_interface_that_a_person_exports_is_checked(name, value, peer, level):
    finding = by_name(network_findings(replace(NETWORK, peer=peer, exported={name: value})))[name]
    assert (finding.level, finding.value) == (level, value)


@pytest.mark.parametrize(
    ("kind", "elsewhere", "level"),
    [
        ("nfs4", True, "ok"),
        ("ext4", True, "note"),
        ("tmpfs", True, "problem"),
        ("tmpfs", False, "ok"),
    ],
)
def test_where_run_folders_lie(kind, elsewhere, level):
    place, *_ = folder_findings(replace(RUNS, kind=kind), elsewhere)
    assert (place.level, place.value) == (level, f"/home/anna/runs: {kind}")


def test_a_folder_where_a_trial_failed():
    failed = "Function not implemented"
    found = by_name(folder_findings(replace(RUNS, lock=failed, link=failed), elsewhere=False))
    assert [name for name, finding in found.items() if finding.level == "problem"] == ["lock", "hard link"]
    assert found["lock"].words.startswith("Function not implemented; two runs could write")


def test_locks_that_hold_on_one_node_only():
    local = replace(RUNS, options=("rw", "local_lock=all"))
    assert by_name(folder_findings(local, elsewhere=True))["lock"].level == "note"
    assert by_name(folder_findings(local, elsewhere=False))["lock"].level == "ok"


def test_little_space_and_local_disks_are_told():
    assert by_name(folder_findings(replace(RUNS, free_bytes=2**30), elsewhere=False))["space"].level == "note"
    findings = findings_of(replace(LAPTOP, local_disks=(LocalDisk(Path("/tmp"), "ext4", 2**34),)))
    assert by_name(findings)["/tmp"].value == "ext4, 16.0 GiB free"
