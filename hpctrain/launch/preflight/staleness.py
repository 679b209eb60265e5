"""Known changes since a topology was measured. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from hpctrain import __version__
from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.units import format_seconds
from hpctrain.records.format.node_name import compress_node_set
from hpctrain.records.topology.topology import Topology

MAX_AGE_DAYS = 7.0
"""Days after which a topology is measured again, because clusters change."""
_DAY_S = 24 * 3600.0
PROBE_AGAIN_HINT = "measure again with `hpctrain probe`"
"""Advice that follows the reasons why a topology is stale."""


def staleness(
    topology: Topology,
    nodes: Collection[str] | None,
    drivers: Mapping[str, str],
    now: float,
    max_age_days: float = MAX_AGE_DAYS,
) -> list[str]:
    """Return reasons why a plan made from this topology may be wrong now, as lines; [] if none is known.

    A topology of data-sheet figures does not age; only its nodes are compared.

    Args:
        nodes: names of the nodes that the run gets; None if they are not known yet.
        drivers: version of the GPU driver by node, for the nodes where it is known.
        now: seconds since 1970.
        max_age_days: a topology older than this is stale.
    """
    words = _other_nodes(topology, nodes) if nodes is not None else []
    if topology.provenance.mode == "published":
        return words
    if topology.provenance.mode == "prior":
        return [
            *words,
            "nothing in the topology was measured, it is a prior of another tool's file; measure with `hpctrain probe`",
        ]
    return [*words, *_other_drivers(topology, drivers), *_old(topology, now, max_age_days), *_other_version(topology)]


def faults_since(topology: Topology, attempts: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """Return lines about faults of nodes since the topology was measured; these nodes have to be measured again.

    Args:
        attempts: lines of attempts.jsonl.
        now: seconds since 1970. If the topology has a later time, its clock was wrong, and every fault counts as newer.
    """
    made = created_at(topology)
    return [
        f"attempt {line['attempt']}, after the topology was measured: {line['retest']}; {PROBE_AGAIN_HINT}"
        for line in attempts
        if line.get("retest") and (made > now or line.get("end", now) > made)
    ]


def age_s(topology: Topology, now: float) -> float:
    """Return the seconds from the measurement to `now`; negative if a clock is wrong.

    Raises:
        FileError: provenance.created of the topology is no time.
    """
    return now - created_at(topology)


def created_at(topology: Topology) -> float:
    """Return the time of the topology's measurement, in seconds since 1970.

    Raises:
        FileError: provenance.created of the topology is no time.
    """
    text = topology.provenance.created
    try:
        then = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        mistake = FieldError("provenance.created", f"found {text!r}; a time like 2026-11-20T22:00:00Z is expected")
        raise FileError("topology", [mistake]) from None
    return (then if then.tzinfo else then.replace(tzinfo=timezone.utc)).timestamp()


def _other_nodes(topology: Topology, nodes: Collection[str]) -> list[str]:
    known = {node.id for node in topology.nodes}
    missing, extra = [name for name in nodes if name not in known], sorted(known - set(nodes))
    words = []
    if missing:
        names = compress_node_set(missing)
        words.append(f"the topology has no figures of {names}, which the run gets; {PROBE_AGAIN_HINT}")
    if extra:
        names = compress_node_set(extra)
        words.append(f"the topology also has {names}, which the run does not get: a plan on them is refused")
    return words


def _other_drivers(topology: Topology, drivers: Mapping[str, str]) -> list[str]:
    changed: dict[tuple[str, str], list[str]] = {}
    for node in topology.nodes:
        then = {device.driver for device in node.devices if device.driver is not None}
        now = drivers.get(node.id)
        if now is not None and then and then != {now}:
            changed.setdefault((", ".join(sorted(then)), now), []).append(node.id)
    return [
        f"the driver of {compress_node_set(names)} was {then} when it was measured and is {now}; {PROBE_AGAIN_HINT}"
        for (then, now), names in changed.items()
    ]


def _old(topology: Topology, now: float, max_age_days: float) -> list[str]:
    age = age_s(topology, now)
    if age <= max_age_days * _DAY_S:
        return []
    text = f"{age / _DAY_S:.0f} days" if age >= _DAY_S else format_seconds(age)
    return [f"the topology is {text} old, and {max_age_days:g} days are allowed; {PROBE_AGAIN_HINT}"]


def _other_version(topology: Topology) -> list[str]:
    version = topology.provenance.version
    if version == __version__:
        return []
    return [f"hpctrain {version} wrote the topology, this is {__version__}; {PROBE_AGAIN_HINT} if a plan surprises"]
