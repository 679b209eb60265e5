"""The memory options of a plan, in words for people."""

from __future__ import annotations

from hpctrain.records.plan.plan import Plan


def memory_options_text(plan: Plan) -> list[str]:
    """Return the memory options of the plan, each in words, such as 'zero 1 over 4 replicas'; [] if it has
    none."""
    options = []
    if plan.zero:
        copies = f", {plan.dp // plan.shards} copies" if plan.shards < plan.dp else ""
        options.append(f"zero {plan.zero} over {plan.shards} replicas{copies}")
    if plan.sequence_parallel:
        options.append("sequence parallel")
    kinds = [stage.recompute for stage in plan.stages]
    if set(kinds) == {kinds[0]} != {"none"}:
        options.append(f"recompute {kinds[0]}")
    elif len(set(kinds)) > 1:
        options.append(f"recompute by stage: {', '.join(kinds)}")
    return options
