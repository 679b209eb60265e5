"""The lab's network as commands: bridges, links, rates and cuts. Pure: its functions return commands in order, or parse
the output of commands.

A link has two ends. Traffic out of a node is shaped at its own eth0, traffic into it at the bridge's end. Each shaped
end has two `htb` classes: 1:1, with the link's rate, and 1:2, whose queue holds no packet. A cut is a filter that sends
a peer's packets to 1:2, where they vanish as silently as behind a broken switch. The kernels that labs run on often
lack netem, prio and the drop action; all have htb, u32 and bfifo.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from hpctrain.lab.layout import ALIAS, CONTROL, FABRIC, NODE_INTERFACE, ROOT_BRIDGE, LabLayout
from hpctrain.lab.spec import rate_bits_per_s

Command = tuple[str, ...]
Direction = Literal["in", "out"]
DIRECTIONS: tuple[Direction, ...] = ("in", "out")

UNSHAPED = "100gbit"
"""Rate that an end of a link without a limit gets, because an `htb` class needs a rate."""
QUEUE_S = 0.05
"""Longest time in seconds that a packet waits at a shaped end: the queue holds what the link sends in this time."""
# A burst of 64 KiB gives 957 Mbit/s of payload at 1 Gbit/s. Slower links get a smaller burst, because a short
# measurement would otherwise see only the burst.
_BURST_S, _BURST_MIN, _BURST_MAX = 0.005, 4096, 65536
# The kernel sends up to 64 KiB as one packet, which a shorter queue would always drop.
_QUEUE_MIN = 131072
_CUT_PREF = 1000
_CLASS_RATE = re.compile(r"^class htb 1:1 .* rate (\d+(?:\.\d+)?)([KMGT]?)bit", re.MULTILINE)
_SI = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def build_commands(layout: LabLayout) -> list[Command]:
    """Return the commands that build a lab's whole network, with every link up and shaped."""
    commands: list[Command] = [
        ("ip", "netns", "add", FABRIC),
        _ip(FABRIC, "link", "set", "lo", "up"),
        *_bridge(ROOT_BRIDGE),
        *_control(layout),
    ]
    for index, switch in enumerate(layout.spec.switches):
        commands += _switch(index, switch.uplink_rate)
    for name in layout.names:
        commands += _node(layout, name)
    return commands


def _control(layout: LabLayout) -> list[Command]:
    prefix = layout.spec.network.partition("/")[2]
    return [
        ("ip", "link", "add", CONTROL, "type", "veth", "peer", "name", CONTROL, "netns", FABRIC),
        ("ip", "link", "set", CONTROL, "alias", f"{ALIAS}{layout.folder}"),
        _ip(FABRIC, "link", "set", CONTROL, "master", ROOT_BRIDGE, "up"),
        ("ip", "addr", "add", f"{layout.spec.controller()}/{prefix}", "dev", CONTROL),
        ("ip", "link", "set", CONTROL, "up"),
    ]


def _switch(index: int, uplink_rate: str | None) -> list[Command]:
    bridge, up, down = f"hpctsw{index}", f"hpctu{index}", f"hpctd{index}"
    return [
        *_bridge(bridge),
        _ip(FABRIC, "link", "add", up, "type", "veth", "peer", "name", down),
        _ip(FABRIC, "link", "set", down, "master", ROOT_BRIDGE, "up"),
        _ip(FABRIC, "link", "set", up, "master", bridge, "up"),
        *lane_commands(FABRIC, up, uplink_rate),
        *lane_commands(FABRIC, down, uplink_rate),
    ]


def _node(layout: LabLayout, name: str) -> list[Command]:
    namespace, port = layout.namespace(name), layout.port(name)
    rate = layout.spec.rate_of(layout.node(name))
    prefix = layout.spec.network.partition("/")[2]
    return [
        ("ip", "netns", "add", namespace),
        _ip(namespace, "link", "set", "lo", "up"),
        _ip(FABRIC, "link", "add", port, "type", "veth", "peer", "name", NODE_INTERFACE, "netns", namespace),
        _ip(FABRIC, "link", "set", port, "master", layout.bridge(name), "up"),
        _ip(namespace, "addr", "add", f"{layout.address(name)}/{prefix}", "dev", NODE_INTERFACE),
        _ip(namespace, "link", "set", NODE_INTERFACE, "up"),
        *lane_commands(namespace, NODE_INTERFACE, rate),
        *lane_commands(FABRIC, port, rate),
    ]


def _bridge(name: str) -> list[Command]:
    return [
        _ip(FABRIC, "link", "add", name, "type", "bridge", "stp_state", "0", "forward_delay", "0"),
        _ip(FABRIC, "link", "set", name, "up"),
    ]


def lane_commands(namespace: str, device: str, rate: str | None) -> list[Command]:
    """Return the commands that give one end of a link its two `htb` classes: 1:1 with the rate, and 1:2, which drops
    every packet, for a cut link.

    Args:
        namespace: network namespace of the end.
        device: interface that is the end.
        rate: rate as for tc, such as 100mbit; None: no limit.

    Raises:
        ValueError: `rate` is not a rate of tc, or is below 8kbit.
    """
    return [
        _tc(namespace, "qdisc", device, "root", "handle", "1:", "htb", "default", "1"),
        *rate_commands(namespace, device, rate),
        _tc(namespace, "class", device, "parent", "1:", "classid", "1:2", "htb", "rate", "8kbit", "quantum", "1514"),
        # No packet fits into a queue of one byte, so every packet is dropped.
        _tc(namespace, "qdisc", device, "parent", "1:2", "handle", "20:", "bfifo", "limit", "1"),
    ]


def rate_commands(namespace: str, device: str, rate: str | None) -> list[Command]:
    """Return the commands that set the rate of one end of a link.

    Args:
        namespace: network namespace of the end.
        device: interface that is the end.
        rate: rate as for tc, such as 100mbit; None: no limit.

    Raises:
        ValueError: `rate` is not a rate of tc, or is below 8kbit.
    """
    rate = rate or UNSHAPED
    bytes_per_s = rate_bits_per_s(rate) / 8
    # The burst is at least half a millisecond of traffic; with less, the kernel's timers cannot keep up with a fast
    # link.
    burst = int(max(_BURST_MIN, min(_BURST_MAX, _BURST_S * bytes_per_s), 0.0005 * bytes_per_s))
    limit = int(max(_QUEUE_MIN, QUEUE_S * bytes_per_s + burst))
    shape = ("htb", "rate", rate, "ceil", rate, "burst", f"{burst}b", "cburst", f"{burst}b", "quantum", "60000")
    return [
        _tc(namespace, "class", device, "parent", "1:", "classid", "1:1", *shape),
        _tc(namespace, "qdisc", device, "parent", "1:1", "handle", "10:", "bfifo", "limit", str(limit)),
    ]


def shape_commands(layout: LabLayout, name: str, direction: Direction, rate: str | None) -> list[Command]:
    """Return the commands that set the rate of a node's link in one direction.

    Args:
        direction: `in`: traffic into the node. `out`: traffic out of it.
        rate: rate as for tc, such as 100mbit; None: no limit.

    Raises:
        ValueError: `rate` is not a rate of tc, or is below 8kbit.
    """
    if direction == "out":
        return rate_commands(layout.namespace(name), NODE_INTERFACE, rate)
    return rate_commands(FABRIC, layout.port(name), rate)


def link_command(layout: LabLayout, name: str, up: bool) -> Command:
    """Return the command that sets a node's link up (or with `up` false down), at the bridge's end."""
    return _ip(FABRIC, "link", "set", layout.port(name), "up" if up else "down")


def cut_commands(layout: LabLayout, a: str, b: str) -> list[Command]:
    """Return the commands that stop all traffic between the nodes `a` and `b`; both still reach all others and the
    controller."""
    return [_block(layout, to, source) for to, source in ((a, b), (b, a))]


def _block(layout: LabLayout, to: str, source: str) -> Command:
    pref = str(_CUT_PREF + layout.index(source))
    match = ("u32", "match", "ip", "src", f"{layout.address(source)}/32", "flowid", "1:2")
    return ("tc", "-n", FABRIC, "filter", "add", "dev", layout.port(to), "parent", "1:",
            "protocol", "ip", "pref", pref, *match)  # fmt: skip


def uncut_commands(layout: LabLayout, a: str, b: str) -> list[Command]:
    """Return the commands that undo `cut_commands` for the nodes `a` and `b`."""
    return [
        ("tc", "-n", FABRIC, "filter", "del", "dev", layout.port(to), "parent", "1:",
         "pref", str(_CUT_PREF + layout.index(source)))
        for to, source in ((a, b), (b, a))
    ]  # fmt: skip


def list_cuts_command(layout: LabLayout, name: str) -> Command:
    """Return the tc command that lists the filters that drop packets of other nodes to the node, for `parse_cuts`."""
    return ("tc", "-n", FABRIC, "-j", "filter", "show", "dev", layout.port(name), "parent", "1:")


def parse_cuts(layout: LabLayout, text: str) -> list[str]:
    """Return the names of the nodes that a node is cut off from.

    Args:
        text: output of the node's `list_cuts_command`.
    """
    prefs = {entry.get("pref", 0) for entry in json.loads(text or "[]")}
    return [name for index, name in enumerate(layout.names) if _CUT_PREF + index in prefs]


def list_rate_command(layout: LabLayout, name: str, direction: Direction) -> Command:
    """Return the tc command that shows the rate of a node's link in one direction, for `parse_rate`."""
    namespace = layout.namespace(name) if direction == "out" else FABRIC
    device = NODE_INTERFACE if direction == "out" else layout.port(name)
    return ("tc", "-n", namespace, "class", "show", "dev", device)


def parse_rate(text: str) -> float | None:
    """Return the rate of one end of a link in bits per second; None if the rate is not limited.

    Args:
        text: output of `list_rate_command`. It is plain text, because tc has no JSON for classes.
    """
    match = _CLASS_RATE.search(text)
    if match is None:
        return None
    bits = float(match[1]) * _SI[match[2]]
    return None if bits >= rate_bits_per_s(UNSHAPED) else bits


def parse_links(text: str) -> dict[str, bool]:
    """Return name of an interface -> whether it is up.

    Args:
        text: output of `ip -j link show`.
    """
    return {entry["ifname"]: "UP" in entry["flags"] for entry in json.loads(text or "[]")}


def _ip(namespace: str, *words: str) -> Command:
    return ("ip", "-n", namespace, *words)


def _tc(namespace: str, what: str, device: str, *words: str) -> Command:
    return ("tc", "-n", namespace, what, "replace", "dev", device, *words)
