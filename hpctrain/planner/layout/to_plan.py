"""Writes a layout as a plan; `from_plan` reads it back."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.layout.layout import Layout
from hpctrain.records.plan.gradient_codec import Messages
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.schedule.generate import make_schedule


def plan_of_layout(layout: Layout, cost: CostModel, **fields: object) -> Plan:
    """Return the plan of a layout.

    Args:
        fields: the plan's fields that the layout does not decide.
    """
    memory_options = layout.memory_options
    edges = pairwise([0, *accumulate(layout.blocks)])
    values = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "zero": memory_options.zero,
        "shard": layout.shards if 1 < layout.shards < layout.dp else None,
        "sequence_parallel": memory_options.sequence_parallel,
        "schedule": layout.schedule,
        "stages": [
            Stage(layers=edge, recompute=memory_options.recompute, messages=_messages(cost, layout, stage))
            for stage, edge in enumerate(edges)
        ],
        "replicas": [_replica(layout, replica) for replica in range(layout.dp)],
        "ranks": [device for rank in range(layout.pp) for row in layout.placement for device in row[rank].device_ids],
        "actions": {replica: _actions(layout, replica) for replica in range(layout.dp)},
    }
    return Plan.model_validate(values | fields)


def _messages(cost: CostModel, layout: Layout, stage: int) -> Messages:
    """The codec of the messages from a stage to the next; "none" if no message leaves a node."""
    if stage == len(layout.blocks) - 1:
        return "none"
    hops = [(layout.unit(replica, stage), layout.unit(replica, stage + 1)) for replica in range(layout.dp)]
    codecs = (cost.messages(a, b, stage) for a, b in hops)
    return next((codec for codec in codecs if codec != "none"), "none")


def _replica(layout: Layout, replica: int) -> Replica:
    count = layout.micro_batches[replica]
    return Replica(
        sequences=layout.micro_batch * count,
        micro_batch=layout.micro_batch,
        micro_batches=count,
        devices=[list(layout.unit(replica, stage).device_ids) for stage in range(len(layout.blocks))],
    )


def _actions(layout: Layout, replica: int) -> dict[int, list[str]]:
    table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[replica])
    return dict(enumerate(table.rows()))
