"""Messages between stages in fewer bytes beside full ones; called by the cases beside it, on four ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import PLANS, SEQ, SPEC, batch, changed, my_rows, open_pipeline, whole
from processes import largest

from hpctrain.parallel.gradients import local_gradients
from hpctrain.records.plan.plan import Plan

ROUNDED = {
    "pp4, int8": ("pp4", ("int8",)),
    "interleaved, uneven replicas, three ways": ("pp2 interleaved dp2", ("bf16", "int8", "none")),
    "halved backwards, two stages on a rank, tp": ("pp2 zbv tp2", ("int8",)),
    "split sequence, recomputed": ("pp2 tp2 sequence", ("bf16",)),
    "sharded": ("zero1 pp2 dp2 interleaved", ("int8",)),
}
"""A plan of the table, and how messages behind its stages travel, repeated."""
SAME_WAY_BACK = 2
BYTES = {"none": lambda count: 4 * count, "bf16": lambda count: 2 * count, "int8": lambda count: -(-count // 256) * 260}


def rounded(name: str) -> Plan:
    """The plan of a case."""
    plan, ways = ROUNDED[name]
    full = changed(plan, ("full",)) if "recomputed" in name else PLANS[plan][0]
    value = full.model_dump()
    for index, stage in enumerate(value["stages"][:-1]):
        stage["messages"] = ways[index % len(ways)]
    return Plan.model_validate(value)


def bytes_between_stages(plan: Plan) -> int:
    """Of a step over all ranks, by arithmetic."""
    owner, total = plan.stage_owner(), 0
    for replica in plan.replicas:
        count = replica.micro_batch * SEQ * SPEC.dim // (plan.tp if plan.sequence_parallel else 1)
        for index, stage in enumerate(plan.stages[:-1]):
            if owner[index] != owner[index + 1]:
                total += SAME_WAY_BACK * replica.micro_batches * plan.tp * BYTES[stage.messages](count)
    return total


def beside_full(name: str, rank: int) -> dict[str, Any]:
    """A step of the plan of a case twice, and one with full messages: bytes, how far loss and gradient are as shares of
    the full ones, whether the second step had other bits, and how far evaluations are."""
    plan = rounded(name)
    full = plan.model_copy(update={"stages": [s.model_copy(update={"messages": "none"}) for s in plan.stages]})
    losses, gradients, valid, sent = [], [], [], 0
    for number, each in enumerate((full, plan)):
        pipeline, coordinate, reducer = open_pipeline(each, SPEC, rank)
        rows, parameters = my_rows(each, coordinate, batch(SPEC, 0)), [p for _, p in pipeline.parameters()]
        valid.append(pipeline.evaluate(*rows))
        for _ in range(1 + number):
            for parameter in parameters:
                parameter.grad = None
            pipeline.take_counters()
            losses.append(float(pipeline.step(*rows)))
            sent = sum(counters.sent_bytes for counters in pipeline.take_counters().values())
            reducer.reduce(local_gradients(parameters))
            gradients.append([whole(parameter.grad).clone() for parameter in parameters])
    exact, found, again = gradients
    sums = [
        sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True)),
        sum(float(a.double().square().sum()) for a in exact),
        float(sent),
    ]
    total = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "sent": int(total[2]),
        "expected": bytes_between_stages(plan),
        "gradient": float((total[0] / total[1]).sqrt()),
        "loss": largest([abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-9)]),
        "unequal": largest([float(not torch.equal(a, b)) for a, b in zip(found, again, strict=True)]),
        "validation": largest([abs(valid[1] - valid[0])]),
    }
