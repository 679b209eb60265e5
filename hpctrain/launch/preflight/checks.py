"""Check, before anything starts, that run file, topology, plan and nodes belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.base.errors import FieldError, FileError, RefusedError
from hpctrain.launch.preflight.staleness import MAX_AGE_DAYS, age_s, faults_since, staleness
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.folder import RunFolder
from hpctrain.schedule.resolve import check_collective_order
from hpctrain.schedule.runnable import check_runnable


def check_topology(topology: Topology, nodes: Sequence[str], source: str) -> None:
    """Check that the topology holds measurements of every node of the run.

    Raises:
        RefusedError: it lacks some of the nodes.
    """
    known = {node.id for node in topology.nodes}
    missing = [node for node in nodes if node not in known]
    if missing:
        raise RefusedError(
            f"{source}: it is a topology of {_some(sorted(known))}; this run has {_some(list(nodes))}; "
            f"measure {_some(missing)} with `hpctrain probe`, or leave the file out to have it measured"
        )


def is_usable(topology: Topology, nodes: Sequence[str], now: float) -> bool:
    """Whether the topology in a run folder is still usable: it is measured, covers all nodes, is young enough, and its
    verdict is not `refuse`. After a refusal the nodes are measured again, because nodes that did not answer then may do
    so now."""
    if topology.provenance.mode == "prior" or topology.verdict.status == "refuse":
        return False
    if any(node not in {known.id for known in topology.nodes} for node in nodes):
        return False
    return age_s(topology, now) < MAX_AGE_DAYS * 24 * 3600


def check_devices(plan: Plan, topology: Topology, source: str) -> None:
    """Check that every device of the plan was measured, and that the plan uses at most one end of each broken link.

    Raises:
        RefusedError: a device was not measured, or the plan uses both ends of a broken link.
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
    """Check that a given plan is for this run and these nodes; all disagreements are reported together.

    Raises:
        FileError: the plan disagrees with the run; the message has every disagreement.
        InputError: a custom schedule is incomplete, or something in the plan cannot be executed.
        RefusedError: the plan is provisional or for other nodes.
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
    """Return the first few of many names, as text."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def drop_stale_topology(
    folder: RunFolder, nodes: list[str], now: float, drivers: Mapping[str, str] | None = None
) -> list[str]:
    """Rename the topology in a run folder if it is too old, is for other nodes, or is older than a fault on them, so
    that the attempt probes again.

    Args:
        now: seconds since 1970.
        drivers: version of the GPU driver by node, where it is known.

    Returns:
        Reasons against the topology, as lines; [] if there are none.
    """
    path = folder.path / "topology.json"
    if not path.exists():
        return []
    try:
        topology = Topology.read(path, owned=True)
        faults = faults_since(topology, folder.attempts(), now)
        words = [*staleness(topology, nodes, drivers or {}, now), *faults]
        if not faults and is_usable(topology, nodes, now):
            return words
    except FileError as error:
        words = str(error).splitlines()  # unreadable: measure again too
    path.rename(path.with_name("topology-before.json"))
    return [*words, "the nodes are measured again; the topology found is now topology-before.json"]
