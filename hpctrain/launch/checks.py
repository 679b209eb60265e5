"""What can be known to be wrong before anything starts: files that do not belong together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from hpctrain.base.errors import FileError, Mistake, Refused
from hpctrain.records.model_spec import ModelSpec
from hpctrain.records.plan import Plan
from hpctrain.records.run import Run
from hpctrain.records.topology import Topology
from hpctrain.schedule.resolve import schedule_of

TOPOLOGY_LASTS_S = 7 * 24 * 3600.0
"""A topology older than this is measured again: clusters change."""


def check_topology(topology: Topology, nodes: Sequence[str], source: str) -> None:
    """The file must hold measurements of every node of the run.

    Raises:
        Refused: it is a topology of other nodes.
    """
    known = {node.id for node in topology.nodes}
    missing = [node for node in nodes if node not in known]
    if missing:
        raise Refused(
            f"{source}: it is a topology of {_some(sorted(known))}; this run has {_some(list(nodes))}; "
            f"measure {_some(missing)} with `hpctrain probe`, or leave the file out to have it measured"
        )


def is_usable(topology: Topology, nodes: Sequence[str], now: float) -> bool:
    """Whether a topology that a run already has still serves: it covers the nodes and is young enough."""
    if any(node not in {known.id for known in topology.nodes} for node in nodes):
        return False
    created = datetime.fromisoformat(topology.provenance.created.replace("Z", "+00:00"))
    if created.tzinfo is None:
        created = created.replace(tzinfo=timezone.utc)
    return now - created.timestamp() < TOPOLOGY_LASTS_S


def check_devices(plan: Plan, topology: Topology, source: str) -> None:
    """Every device of the plan must be one that was measured.

    Raises:
        Refused: it is not.
    """
    known = topology.places()
    strange = [place for place in plan.ranks if place not in known]
    if strange:
        raise Refused(f"{source}: ranks: {strange[0]!r} is no device of the topology, which has {_some(known)}")


def check_plan(plan: Plan, run: Run, spec: ModelSpec, nodes: Sequence[str], source: str) -> None:
    """A plan given by hand must be of this run and these nodes; all that does not agree is told at once.

    Raises:
        FileError: with every disagreement.
        InputError: a custom schedule is not whole.
        Refused: it is provisional or of other nodes.
    """
    if plan.provisional:
        raise Refused(f"{source}: a provisional plan is never run; make one from a measured topology: `hpctrain plan`")
    other = [node for node in plan.nodes if node not in nodes]
    if other:
        raise Refused(
            f"{source}: it uses {_some(other)}, this run has {_some(list(nodes))}; "
            "make a plan for these with `hpctrain plan`"
        )
    mistakes = []
    if plan.rows != run.batch.global_:
        text = f"their rows add up to {plan.rows}, the run's batch.global is {run.batch.global_}"
        mistakes.append(Mistake("replicas", text))
    if plan.layers != spec.layers:
        mistakes.append(Mistake("stages", f"they hold {plan.layers} blocks, the model has {spec.layers}"))
    for name, count in (("heads", spec.heads), ("kv_heads", spec.key_value_heads), ("ffn_dim", spec.hidden)):
        if count % plan.tp:
            mistakes.append(Mistake("tp", f"found {plan.tp}; the model's {name} {count} is not a multiple of it"))
    if mistakes:
        raise FileError(source, mistakes)
    for replica in range(plan.dp):
        schedule_of(plan, replica)


def _some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
