"""Each fault that a node's system or a device shows has its code; a fact that nobody told makes none."""

from __future__ import annotations

import pytest

from hpctrain.probe.faults.node_faults import device_faults, host_faults, interface_env
from hpctrain.records.topology.evidence import HostFacts, NvlinkPeer, PcieLink
from hpctrain.records.topology.topology import Device, DeviceType, Node

TYPES = {"gpu": DeviceType(kind="cuda", name="GPU")}
NVLINK = NvlinkPeer(links=2, active=2)
GEN5 = {"generation": 5, "width": 16, "generation_max": 5, "width_max": 16, "under_load": True}


def device(**facts) -> Device:
    figures = {"flops": {"bf16": 7e14}, "memory_bytes_per_s": 4e12, "driver": "570.86.10", "pcie": PcieLink(**GEN5)}
    return Device(id="cuda0", type="gpu", **{**figures, **facts})


def nodes(special: dict | None = None, facts: dict | None = None, count: int = 6, **parts) -> list[Node]:
    """Alike nodes; the last one has another device, other facts or other parts."""
    usual = {"mtu": {"ib0": 4092}, "clock_offset_s": 0.001, "hostname_resolves_to": "10.0.0.1"}
    usual["interfaces"] = {"lo": ["127.0.0.1"], "eth0": ["192.168.0.1"], "ib0": ["10.0.0.1"]}
    made = []
    for index in range(count):
        last = index == count - 1
        told = HostFacts(**{**usual, **(facts or {})} if last else usual)
        own = {"addr": "10.0.0.1", "iface": "ib0", "devices": [device(**(special or {}) if last else {})]}
        made.append(Node(id=f"n{index}", host_facts=told, **{**own, **parts} if last else own))
    return made


def found(some: list[Node]) -> list[tuple[str | None, str, str]]:
    faults = host_faults(some) + device_faults(some, TYPES)
    assert all(fault.reason.evidence and fault.reason.fix for fault in faults)
    return [(fault.node, fault.reason.code, fault.severity) for fault in faults]


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"pcie": PcieLink(**{**GEN5, "generation": 3})}, ("n5", "PCIE_DOWNSHIFT", "exclude")),
        ({"pcie": PcieLink(**{**GEN5, "width": 8})}, ("n5", "PCIE_DOWNSHIFT", "exclude")),
        ({"nvlink": {"cuda1": NvlinkPeer(links=18, active=17)}}, ("n5", "NVLINK_DOWN", "exclude")),
        ({"throttle_reasons": ["sw_power_cap", "hw_slowdown"]}, ("n5", "THROTTLED", "warn")),
        ({"p2p": {"cuda1": "no"}, "nvlink": {"cuda1": NVLINK}}, ("n5", "P2P_DISABLED", "exclude")),
        ({"ecc_errors": 2, "xid": 48}, ("n5", "ECC_ERRORS", "exclude")),
        ({"flops": {"bf16": 6.5e14}}, ("n5", "SLOW_NODE", "warn")),
        ({"driver": "550.54.15"}, (None, "MIXED_DRIVERS", "warn")),
        ({"driver": "570.12.01"}, (None, "MIXED_DRIVERS", "note")),
    ],
)  # fmt: skip
def test_a_fault_of_a_device(special: dict, expected: tuple) -> None:
    assert found(nodes(special)) == [expected]


@pytest.mark.parametrize(
    ("facts", "parts", "expected"),
    [
        ({"mtu": {"ib0": 2044}}, {}, (None, "MTU_MISMATCH", "warn")),
        ({"clock_offset_s": -3.0}, {}, ("n5", "CLOCK_SKEW", "warn")),
        ({"hostname_resolves_to": "127.0.1.1"}, {}, ("n5", "LOOPBACK_HOSTNAME", "note")),
        ({"mtu": {}}, {"iface": "eth0", "addr": "192.168.0.1"}, ("n5", "WRONG_INTERFACE", "warn")),
        ({"mtu": {}}, {"iface": "docker0", "addr": "172.17.0.1"}, ("n5", "WRONG_INTERFACE", "warn")),
        ({"interfaces": {"eth0": ["192.168.0.1"]}}, {}, ("n5", "TCP_FALLBACK", "warn")),
    ],
)
def test_a_fault_of_a_system(facts: dict, parts: dict, expected: tuple) -> None:
    assert found(nodes(facts=facts, **parts)) == [expected]


@pytest.mark.parametrize(
    "special",
    [
        {},
        {"pcie": PcieLink(**{**GEN5, "generation": 1, "under_load": False})},
        {"pcie": None, "driver": None},
        {"throttle_reasons": ["sw_power_cap"]},
        {"p2p": {"cuda1": "no"}},
        {"p2p": {"cuda1": "unknown"}},
        {"ecc_errors": 0},
        {"flops": {"bf16": 6.9e14}},
    ],
)
def test_what_is_normal_or_unknown_is_no_fault(special: dict) -> None:
    assert found(nodes(special)) == []


def test_nodes_that_told_nothing_have_no_fault() -> None:
    bare = [Node(id=f"n{index}", addr="10.0.0.1", devices=[Device(id="cpu0", type="gpu")]) for index in range(3)]

    assert found(bare) == []
    assert interface_env(bare) == {}


def test_p2p_that_other_nodes_have_is_missed() -> None:
    able = [node.model_copy(update={"devices": [device(p2p={"cuda1": "ok"})]}) for node in nodes()]

    assert found([*able[:-1], nodes({"p2p": {"cuda1": "no"}})[-1]]) == [("n5", "P2P_DISABLED", "exclude")]


def test_the_exported_interface_is_one_that_all_nodes_have() -> None:
    mixed = nodes(iface="eth0", addr="192.168.0.1")
    assert interface_env(mixed) == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}

    apart = nodes(facts={"interfaces": {"eth0": ["192.168.0.1"]}}, iface="eth0", addr="192.168.0.1")
    assert interface_env(apart)["GLOO_SOCKET_IFNAME"] == "eth0"
