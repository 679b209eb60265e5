"""The lab's network as commands, and what tc and ip answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import InputError
from hpctrain.lab.layout import LabLayout, is_own_namespace, load_layout, state_folder
from hpctrain.lab.network import (
    build_commands,
    cut_commands,
    parse_cuts,
    parse_links,
    parse_rate,
    rate_commands,
    shape_commands,
    uncut_commands,
)
from hpctrain.lab.spec import LabSpec

FOLDER = Path("/run/hpctrain-lab")

CLASSES = """class htb 1:1 root leaf 10: prio 0 rate {rate} ceil {rate} burst 64Kb cburst 64Kb
class htb 1:2 root leaf 20: prio 0 rate 8Kbit ceil 8Kbit burst 1600b cburst 1600b
"""
FILTERS = (
    '[{"protocol":"ip","pref":1001,"kind":"u32","chain":0},'
    '{"protocol":"ip","pref":1001,"kind":"u32","chain":0,"options":{"fh":"800:","ht_divisor":1}},'
    '{"protocol":"ip","pref":1003,"kind":"u32","chain":0,"options":{"fh":"801::800","flowid":"1:2"}}]'
)


def layout(**spec: object) -> LabLayout:
    return LabLayout(FOLDER, LabSpec.from_json(spec))


def text(commands) -> list[str]:
    return [" ".join(command) for command in commands]


def test_two_nodes_behind_a_slow_uplink():
    lines = text(build_commands(layout(nodes=2, switches=[{"nodes": "node1", "uplink_rate": "100mbit"}])))
    assert lines[:4] == [
        "ip netns add hpctfabric",
        "ip -n hpctfabric link set lo up",
        "ip -n hpctfabric link add hpctbr type bridge stp_state 0 forward_delay 0",
        "ip -n hpctfabric link set hpctbr up",
    ]
    assert "ip addr add 198.18.7.1/24 dev hpctctl" in lines
    assert "ip link set hpctctl alias hpctrain lab /run/hpctrain-lab" in lines
    assert "ip -n hpctfabric link set hpctv0 master hpctbr up" in lines
    assert "ip -n hpctfabric link set hpctv1 master hpctsw0 up" in lines
    assert "ip -n hpct-node1 addr add 198.18.7.11/24 dev eth0" in lines
    shaped = [line for line in lines if "classid 1:1 htb rate 100mbit" in line]
    assert [line.split()[6] for line in shaped] == ["hpctu0", "hpctd0"]
    assert len([line for line in lines if "classid 1:1 htb rate 1gbit" in line]) == 4


@given(st.integers(1, 200), st.integers(0, 40))
def test_only_own_names_that_the_kernel_takes(nodes, switches):
    lab = layout(nodes=nodes, switches=[{"nodes": f"node{at}"} for at in range(min(nodes, switches))])
    for command in build_commands(lab):
        words = list(command)
        devices = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("dev", "name", "master")]
        devices += [words[4]] if words[3:4] == ["add"] and words[2] == "link" else []
        assert all(device == "eth0" or (device.startswith("hpct") and len(device) <= 15) for device in devices)
        spaces = [
            words[at + 1] for at, word in enumerate(words[:-1]) if word in ("-n", "netns") and words[1] != "netns"
        ]
        assert all(is_own_namespace(space) for space in spaces)
        if "eth0" in devices:
            assert spaces, "the host's own eth0 must never be touched"


def test_names_that_are_not_ours_are_left_alone():
    assert [is_own_namespace(name) for name in ("hpct-node0", "hpctfabric", "hpctrain-test-1", "node0", "cni-1")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_each_direction_is_shaped_at_its_own_end():
    lab = layout(nodes=2)
    assert text(shape_commands(lab, "node1", "out", "100mbit"))[0].startswith(
        "tc -n hpct-node1 class replace dev eth0 parent 1: classid 1:1 htb rate 100mbit ceil 100mbit burst 62500b"
    )
    into = text(shape_commands(lab, "node1", "in", "100mbit"))
    assert into[0].startswith("tc -n hpctfabric class replace dev hpctv1 parent 1: classid 1:1 htb rate 100mbit")
    assert into[1] == "tc -n hpctfabric qdisc replace dev hpctv1 parent 1:1 handle 10: bfifo limit 687500"


@given(st.integers(8, 100_000_000))
def test_a_queue_takes_the_largest_packet_and_a_burst(kbit):
    shape, queue = rate_commands("hpctfabric", "hpctv0", f"{kbit}kbit")
    burst = int(shape[shape.index("burst") + 1].rstrip("b"))
    assert burst >= 1514
    assert int(queue[-1]) >= max(65536, burst)


def test_a_cut_stops_both_directions_and_is_undone_in_both():
    lab = layout(nodes=3)
    assert text(cut_commands(lab, "node0", "node2")) == [
        "tc -n hpctfabric filter add dev hpctv0 parent 1: protocol ip pref 1002 u32 match ip src 198.18.7.12/32"
        " flowid 1:2",
        "tc -n hpctfabric filter add dev hpctv2 parent 1: protocol ip pref 1000 u32 match ip src 198.18.7.10/32"
        " flowid 1:2",
    ]
    assert text(uncut_commands(lab, "node0", "node2")) == [
        "tc -n hpctfabric filter del dev hpctv0 parent 1: pref 1002",
        "tc -n hpctfabric filter del dev hpctv2 parent 1: pref 1000",
    ]


def test_what_tc_and_ip_answer():
    assert parse_cuts(layout(nodes=4), FILTERS) == ["node1", "node3"]
    assert parse_cuts(layout(nodes=4), "") == []
    links = '[{"ifname":"hpctv0","flags":["BROADCAST","UP"]},{"ifname":"hpctv1","flags":["BROADCAST"]}]'
    assert parse_links(links) == {"hpctv0": True, "hpctv1": False}


@pytest.mark.parametrize(
    ("rate", "bits"), [("100Mbit", 1e8), ("1Gbit", 1e9), ("1500Kbit", 1.5e6), ("8bit", 8.0), ("100Gbit", None)]
)
def test_rates_as_tc_prints_them(rate, bits):
    assert parse_rate(CLASSES.format(rate=rate)) == bits


def test_an_end_without_lanes_has_no_rate():
    assert parse_rate("") is None


@pytest.mark.parametrize(
    ("texts", "names"),
    [(["node1"], ["node1"]), (["all"], ["node0", "node1", "node2"]), (["node[1-2]", "node1"], ["node1", "node2"])],
)
def test_nodes_by_name_by_set_and_all(texts, names):
    assert layout(nodes=3).find(texts) == names


@pytest.mark.parametrize(
    ("name", "told"),
    [("nod1", "nod1: no such node in the lab; did you mean 'node1'?"), ("x", r"x: .*; there are: node\[0-2\]"),
     ("node[0", r"node\[0: no name of a node")],
)  # fmt: skip
def test_an_unknown_node_is_told(name, told):
    with pytest.raises(InputError, match=told):
        layout(nodes=3).find([name])


@pytest.mark.parametrize("folder", ["relative/lab", "/" + "x" * 90, "/run/my lab", "/run/%n"])
def test_a_folder_that_slurm_could_not_use_is_refused(folder):
    with pytest.raises(InputError, match=r"HPCTRAIN_LAB=.*: allowed: an absolute path"):
        state_folder({"HPCTRAIN_LAB": folder})


def test_the_folder_is_the_variable_or_the_default():
    assert state_folder({}) == FOLDER
    assert state_folder({"HPCTRAIN_LAB": "/run/other"}) == Path("/run/other")


def test_without_a_lab_the_next_step_is_told(tmp_path):
    with pytest.raises(InputError, match=r"no lab is up in .*; start one with `hpctrain lab up`"):
        load_layout(tmp_path)
