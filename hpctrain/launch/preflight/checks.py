"""Checks, before anything starts, that run file, topology, plan and nodes belong together, and that nothing is known to
have changed since the topology was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.base.errors import FieldError, FileError, RefusedError
from hpctrain.base.units import format_seconds
from hpctrain.records.format.node_name import compress_node_set
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.folder import RunFolder
from hpctrain.schedule.resolve import check_collective_order
from hpctrain.schedule.runnable import check_runnable


def check_topology(topology: Topology, nodes: Sequence[str], source: str) -> None:
    """Check that the topology holds measurements of every node of the run.

    Args:
        nodes: names of the run's nodes.
        source: path of the topology file, for the message.

    Raises:
        RefusedError: the topology lacks some of the nodes.
    """
    known = {node.id for node in topology.nodes}
    missing = [node for node in nodes if node not in known]
    if missing:
        raise RefusedError(
            f"{source}: it is a topology of {_some(sorted(known))}; this run has {_some(list(nodes))}; "
            f"measure {_some(missing)} with `hpctrain probe`, or leave the file out to have it measured"
        )


def is_usable(topology: Topology, nodes: Sequence[str], now: float) -> bool:
    """Return whether the topology in a run folder is still usable: it is no prior of another tool's file, has all of
    `nodes`, is less than MAX_AGE_DAYS old, and its verdict is not `refuse`.

    After the verdict `refuse` the nodes are measured again, because nodes that did not answer then may answer now.

    Args:
        nodes: names of the attempt's nodes.
        now: seconds since 1970.

    Raises:
        FileError: provenance.created of the topology is no time.
    """
    if topology.provenance.mode == "prior" or topology.verdict.status == "refuse":
        return False
    if any(node not in {known.id for known in topology.nodes} for node in nodes):
        return False
    return age_s(topology, now) < MAX_AGE_DAYS * 24 * 3600


def check_devices(plan: Plan, topology: Topology, source: str) -> None:
    """Check that the topology has every device of the plan, and that the plan uses at most one end of each broken link.

    Args:
        source: path of the plan file, for the message.

    Raises:
        RefusedError: a device is missing, or the plan uses both ends of a broken link.
    """
    known = topology.device_ids()
    strange = [place for place in plan.ranks if place not in known]
    if strange:
        raise RefusedError(f"{source}: ranks: {strange[0]!r} is no device of the topology, which has {_some(known)}")
    apart = next((pair for pair in topology.fabric.broken if set(pair) <= set(plan.nodes)), None)
    if apart is not None:
        raise RefusedError(
            f"{source}: it uses {apart[0]} and {apart[1]}, whose link the probe could not measure; allowed: one of "
            "them. Make a plan with `hpctrain plan`, or probe again"
        )


def check_plan(plan: Plan, run: Run, spec: Spec, nodes: Sequence[str], source: str) -> None:
    """Check that a plan is for this run, and uses no other nodes than `nodes`.

    Args:
        spec: the run's model.
        source: path of the plan file, for the message.

    Raises:
        FileError: the plan's batch or blocks differ from the run's, or the model cannot be cut into so many stages or
            tensor-parallel parts; the message has every mistake.
        InputError: a custom schedule is incomplete, or something in the plan cannot be executed.
        RefusedError: the plan is provisional, or uses other nodes.
    """
    if plan.provisional:
        raise RefusedError(
            f"{source}: a provisional plan is never run; make one from a measured topology: `hpctrain plan`"
        )
    other = [node for node in plan.nodes if node not in nodes]
    if other:
        raise RefusedError(
            f"{source}: it uses {_some(other)}, this run has {_some(list(nodes))}; "
            "make a plan for these with `hpctrain plan`"
        )
    mistakes = []
    if plan.sequences != run.batch.global_:
        text = f"their sequences add up to {plan.sequences}, the run's batch.global is {run.batch.global_}"
        mistakes.append(FieldError("replicas", text))
    if plan.layers != spec.layers:
        mistakes.append(FieldError("stages", f"they hold {plan.layers} blocks, the model has {spec.layers}"))
    for field, value, reason in (
        ("tp", plan.tp, spec.tensor_parallel_error(plan.tp)),
        ("stages", len(plan.stages), spec.pipeline_error(len(plan.stages))),
    ):
        if reason is not None:
            mistakes.append(FieldError(field, f"found {value}; {reason}"))
    if mistakes:
        raise FileError(source, mistakes)
    check_collective_order(plan)
    check_runnable(plan, run)


def _some(names: Sequence[str]) -> str:
    """Return up to eight of the names as text, and the number of the others: 'n0, n1', 'n0, …, n7 and 4 more'."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def drop_stale_topology(
    folder: RunFolder,
    nodes: list[str],
    now: float,
    drivers: Mapping[str, str] | None = None,
    shared: bool = False,
    devices_per_node: int | None = None,
) -> list[str]:
    """Rename the topology in a run folder to topology-before.json if it must not be used, so that the attempt probes
    again.

    It must not be used if it is unreadable; `is_usable` is false; it is older than a fault after which nodes have to be
    measured again; it was measured with whole nodes and the attempt has a part of each, or the other way round; or the
    run cuts CPU nodes into another number of devices.

    Args:
        nodes: names of the attempt's nodes.
        now: seconds since 1970.
        drivers: version of the GPU driver by node, where it is known.
        shared: whether the attempt has only a part of each node.
        devices_per_node: as of `cluster` in the run file.

    Returns:
        Reasons against the topology and the renaming, as lines for a person; [] if nothing is against the topology, or
        the folder has none. A topology that stays may have reasons against it too, such as another driver.

    Raises:
        UntrustedError: the topology, attempts.jsonl or the run folder is untrusted.
        OSError: the topology cannot be renamed.
    """
    path = folder.path / "topology.json"
    if not path.exists():
        return []
    try:
        topology = Topology.read(path, owned=True)
        faults = faults_since(topology, folder.attempts(), now) + other_share(topology, shared)
        faults += other_cut(topology, devices_per_node)
        words = [*staleness(topology, nodes, drivers or {}, now), *faults]
        if not faults and is_usable(topology, nodes, now):
            return words
    except FileError as error:
        words = str(error).splitlines()  # unreadable: measure again too
    path.rename(path.with_name("topology-before.json"))
    return [*words, "the nodes are measured again; the topology found is now topology-before.json"]


def other_share(topology: Topology, shared: bool) -> list[str]:
    """Return a line if a topology of whole nodes is to be used for a part of each, or the other way round: the job then
    has other devices, CPUs and memory than were measured; [] otherwise, and for figures from data sheets.

    Args:
        shared: whether the run has only a part of each node.
    """
    if topology.provenance.shared == shared or topology.provenance.mode == "published":
        return []
    whole, part = "whole nodes", "a part of each node"
    was, now = (part, whole) if topology.provenance.shared else (whole, part)
    return [f"the topology was measured with {was}, and the job has {now}"]


def other_cut(topology: Topology, wanted: int | None) -> list[str]:
    """Return a line if CPU nodes were measured with another number of devices than `wanted`, the run's
    `cluster.devices_per_node`; else []. Nodes with GPUs, figures from data sheets and a `wanted` of None have no
    line."""
    kinds = [[topology.device_types[device.type].kind for device in node.devices] for node in topology.nodes]
    counts = {len(on_node) for on_node in kinds if on_node}
    on_gpus = any("cuda" in on_node for on_node in kinds)
    if wanted is None or on_gpus or counts <= {wanted} or topology.provenance.mode == "published":
        return []
    return [f"found {max(counts)} CPU devices a node in the topology, and the run has {wanted}"]


MAX_AGE_DAYS = 7.0
"""Days after which a topology is measured again, because clusters change."""
_DAY_S = 24 * 3600.0
PROBE_AGAIN_HINT = "measure again with `hpctrain probe`"
"""Advice that ends a line with a reason why a topology may be wrong."""


def staleness(
    topology: Topology,
    nodes: Collection[str] | None,
    drivers: Mapping[str, str],
    now: float,
    max_age_days: float = MAX_AGE_DAYS,
) -> list[str]:
    """Return reasons why a plan made from this topology may be wrong now, as lines for a person; [] if none is known.

    A measured topology is compared by its nodes, their drivers, its age and its version of hpctrain. For a topology of
    data-sheet figures, which do not age, only the nodes are compared. For a topology that was converted from another
    tool's file, too, only the nodes are compared, and the lines say that nothing in it was measured.

    Args:
        nodes: names of the nodes that the run gets; None if they are not known yet.
        drivers: version of the GPU driver by node, for the nodes where it is known.
        now: seconds since 1970.
        max_age_days: a topology older than this is stale.

    Raises:
        FileError: provenance.created of a measured topology is no time.
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
    """Return a line for each attempt that ended after the topology was measured, with a fault after which nodes have to
    be measured again; [] without such attempts.

    Args:
        attempts: lines of attempts.jsonl.
        now: seconds since 1970. If the topology's time is later, a clock was wrong, and every fault counts as newer.

    Raises:
        FileError: provenance.created of the topology is no time.
    """
    made = created_at(topology)
    return [
        f"attempt {line['attempt']}, after the topology was measured: {line['retest']}; {PROBE_AGAIN_HINT}"
        for line in attempts
        if line.get("retest") and (made > now or line.get("end", now) > made)
    ]


def age_s(topology: Topology, now: float) -> float:
    """Return the seconds from the topology's measurement to `now`; negative if a clock is wrong.

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


VERSION_FILE = Path("/proc/driver/nvidia/version")
"""File in which the loaded NVIDIA driver states its version."""


def local_driver_version(node: str | None, file: Path = VERSION_FILE) -> dict[str, str]:
    """Return the version of this machine's NVIDIA driver as {node: version}; {} if `node` is None or no NVIDIA driver
    is loaded.

    Args:
        node: this machine's name in the topology.
        file: the file in which the driver states its version.
    """
    if node is None:
        return {}
    try:
        version = parse_driver_version(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    return {} if version is None else {node: version}


def parse_driver_version(text: str) -> str | None:
    """Return the version in a line such as 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  …'; None if the
    text has none."""
    for word in text.partition("\n")[0].split():
        parts = word.split(".")
        if len(parts) >= 2 and all(part.isdecimal() for part in parts):
            return word
    return None
