"""Partitions, nodes and settings from captured output."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import CommandError
from hpctrain.slurm.cluster import Gres, gpu_count, node_states, parse_config, parse_gres, parse_nodes, parse_partitions

DAY_S = 86400


def by_name(items):
    return {item.name: item for item in items}


@pytest.fixture
def nodes(captured):
    return by_name(parse_nodes(captured.sections("nodes.txt")["idle"]))


@pytest.fixture
def partitions(captured, nodes):
    return by_name(parse_partitions(captured.text("partitions.txt"), list(nodes.values())))


def test_nodes(nodes):
    assert list(nodes) == ["gpu1", "gpu2", "gpu3", "mig1"]
    node = nodes["gpu1"]
    assert node.addr == "127.0.0.1"
    assert node.gres == (Gres("gpu", "a100", 4),)
    assert nodes["mig1"].gres == (Gres("gpu", "a100_3g.20gb", 2),)
    assert node.states == {"IDLE"}
    assert node.accepts_jobs
    assert (node.cpus, node.threads_per_core, node.memory_mib) == (16, 1, 64000)


@pytest.mark.parametrize(
    ("section", "flags"), [("drained", "DRAIN"), ("down", "NOT_RESPONDING"), ("prolog_failed", "DRAIN")]
)
def test_nodes_that_take_no_jobs(captured, section, flags):
    (node,) = parse_nodes(captured.sections("nodes.txt")[section])
    assert flags in node.states
    assert not node.accepts_jobs


def test_busy_nodes_take_jobs(captured):
    nodes = parse_nodes(captured.sections("nodes.txt")["running"])
    assert any("MIXED" in node.states for node in nodes)
    assert all(node.accepts_jobs for node in nodes)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE*", {"IDLE", "NOT_RESPONDING"}),
        ("IDLE*+DRAIN", {"IDLE", "NOT_RESPONDING", "DRAIN"}),
        ("IDLE~", {"IDLE", "POWERED_DOWN"}),
        ("DOWN$*", {"DOWN", "MAINTENANCE", "NOT_RESPONDING"}),
        ("MIXED+PLANNED", {"MIXED", "PLANNED"}),
    ],
)
def test_marks_of_older_versions(text, states):
    assert node_states(text) == states


def test_partitions(partitions):
    low, high, short = partitions["low"], partitions["high"], partitions["short"]
    assert [name for name, partition in partitions.items() if partition.default] == ["low"]
    assert (low.nodes_total, low.nodes, low.max_nodes) == (3, ("gpu1", "gpu2", "gpu3"), None)
    assert (low.time_limit_s, low.default_time_s) == (2 * DAY_S, 3600)
    assert (low.preempt_mode, low.grace_s, low.priority_tier) == ("REQUEUE", 8, 1)
    assert (high.preempt_mode, high.grace_s, high.priority_tier) == ("OFF", 0, 10)
    assert (high.max_nodes, high.time_limit_s, high.default_time_s) == (2, None, None)
    assert high.allow_accounts == ("physics", "chem")
    assert (low.allow_accounts, low.deny_accounts, low.allow_qos) == (None, (), None)
    assert (short.allow_accounts, short.deny_accounts) == (None, ("guests",))
    assert partitions["old"].state == "DOWN"


def test_a_partition_has_what_its_nodes_have(captured, partitions):
    low = partitions["low"]
    assert set(low.gres) == {Gres("gpu", "a100", 4), Gres("gpu", "rtx4090", 8)}
    bare = by_name(parse_partitions(captured.text("partitions.txt")))["low"]
    assert bare.gres == ()


def test_settings(captured):
    config = parse_config(captured.text("config.txt"))
    assert config == {
        "cluster": "hydra",
        "version": captured.version,
        "slurmd_timeout_s": 10,
        "cred_expire_s": 10,
        "kill_wait_s": 5,
        "preempt_type": "preempt/partition_prio",
        "preempt_mode": "REQUEUE",
        "preempt_send_user_signal": True,
        "job_requeue": True,
        "max_batch_requeue": 5,
        "min_job_age_s": 300,
        "over_time_limit_s": 0,
        "accounting": False,
        "whole_nodes": False,
        "memory_is_billed": False,
        "max_array_size": 1001,
        "billing_rule": "sum",
        "topology_plugin": "none" if captured.version.startswith("22") else "default",
    }


def test_settings_that_are_not_set(captured):
    text = captured.text("config.txt").replace("cred_expire=10", "x=1").replace("send_user_signal", "other")
    text = text.replace("preempt_other", "").replace("OverTimeLimit           = 0 min", "OverTimeLimit = UNLIMITED")
    config = parse_config(text)
    assert (config["cred_expire_s"], config["preempt_send_user_signal"]) == (120, False)
    assert config["over_time_limit_s"] is None


def test_settings_without_the_needed_ones_are_refused():
    with pytest.raises(CommandError, match="no field 'SLURM_VERSION'"):
        parse_config("ClusterName = x\n")


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("(null)", ()),
        ("", ()),
        ("gpu", (Gres("gpu", None, 1),)),
        ("gpu:8(S:0-1)", (Gres("gpu", None, 8),)),
        ("gpu:a100:4", (Gres("gpu", "a100", 4),)),
        ("gpu:h100-sxm5:8(S:0,1)", (Gres("gpu", "h100-sxm5", 8),)),
        ("gpu:a100_3g.20gb:2,gpu:a100:4(S:0-1),nvme:1", (
            Gres("gpu", "a100_3g.20gb", 2), Gres("gpu", "a100", 4), Gres("nvme", None, 1))),
        ("lustre:no_consume:4G", (Gres("lustre", None, 4 * 2**30),)),
        ("gpu:tesla:2(IDX:0-1,3)", (Gres("gpu", "tesla", 2),)),
    ],
)  # fmt: skip
def test_generic_resources(text, gres):
    assert parse_gres(text) == gres


def test_gpus_of_all_types_count():
    assert gpu_count(parse_gres("gpu:a100:4(S:0,1),gpu:a100_3g.20gb:2,mps:400")) == 6
