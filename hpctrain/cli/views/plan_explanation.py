"""What `plan --explain` prints: placement, time, critical path, memory, and rejected plans."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from hpctrain.base.units import format_bytes, format_delta, format_seconds
from hpctrain.planner.layout.plan_conversion import CostedLayout
from hpctrain.planner.simulate.engine import PathSegment, critical_path
from hpctrain.planner.simulate.predict import simulate_step
from hpctrain.records.plan.plan import Plan, Rejected
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.topology.topology import Topology

BAR = 20
"""Characters of a bar that shows a share of 1."""
MOST_LEGS = 10
"""Most rows of the critical path's table; of a longer path only the first and the last rows are shown."""


def explanation(plan: Plan, topology: Topology, scene: CostedLayout, usable: float, more: Sequence[Rejected]) -> Group:
    """Return the tables that explain a plan, one after the other.

    Args:
        scene: the plan's layout on the topology, with its costs.
        usable: share of a device's memory that a plan may fill.
        more: rejected neighbours besides those in the plan.
    """
    parts: list[Table | str] = [
        _where(plan),
        _time(plan),
        *_compression(plan),
        _path(scene),
        _memory(plan, topology, usable),
    ]
    rejected = [*plan.rejected, *more]
    if rejected:
        parts.append(_rejected(rejected))
    return Group(*parts, *_constants(plan.profile), *(f"note: {note}" for note in plan.notes))


def _constants(profile: CalibrationProfile | None) -> list[str]:
    """Return lines that say where the cost model's constants come from, and by which factors the profile corrects
    them.
    """
    if profile is None:
        return ["constants: those of the package; `--calibrate-from RUN` takes what a run's own steps say"]
    generations = ", ".join(map(str, profile.generations))
    lines = [f"constants: those of the package, corrected by {profile.steps} steps of {profile.source}"]
    lines[0] += f" (generation {generations}):"
    factors = {f"compute of {name}": value for name, value in profile.compute.items()} | {
        "dispatch of tensor parallelism": profile.tensor_parallel,
        "messages and sums": profile.communication,
        "update": profile.update,
    }
    lines += [f"  {name}: × {value:.2f}" for name, value in factors.items() if value is not None]
    lines += [f"  a {name} worker beside its tensors: {format_bytes(v)}" for name, v in profile.process_bytes.items()]
    return lines + [f"  {name}: {text}" for name, text in profile.remarks.items()]


def _where(plan: Plan) -> Table:
    table = Table("replica", "sequences", "micro-batches", "stage", "blocks", "devices", title="What goes where")
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(plan.stages):
            head = (str(number), str(replica.sequences), f"{replica.micro_batches} of {replica.micro_batch}")
            start, stop = stage.layers
            ends = " + embedding" * (index == 0) + " + head" * (index == len(plan.stages) - 1)
            blocks = (f"{start}–{stop - 1}" if stop > start else "none") + ends
            table.add_row(*(head if index == 0 else ("", "", "")), str(index), blocks, " ".join(replica.devices[index]))
    return table


def _time(plan: Plan) -> Table:
    table = Table("term", "seconds", "share", "", title="Predicted time of a step")
    terms = plan.predicted.step_time_s if plan.predicted else {}
    for term, seconds in terms.items():
        share = seconds / terms["total"]
        table.add_row(term, format_seconds(seconds), f"{share:.0%}", "" if term == "total" else _bar(share))
    if plan.predicted and plan.predicted.bound_s is not None:
        bound = plan.predicted.bound_s
        table.add_row("bound", format_seconds(bound), f"{bound / terms['total']:.0%}")
    return table


def _compression(plan: Plan) -> list[Table | str]:
    """Return a line about the codec of the gradients, after a table of the codecs that were compared, if any.

    [] if the planner did not choose the codec.
    """
    spec = plan.compression[0]
    if spec.reason is None:
        return []
    words = f"compression {spec.codec.mode}: {spec.reason}"
    if not spec.compared:
        return [words]
    table = Table(
        "sums", "sent a device", "messages", "processor", "beside backward", "mean step", "verdict",
        title="Ways to sum gradients, the most exact first",
    )  # fmt: skip
    for entry in spec.compared:
        table.add_row(
            entry.codec.mode,
            *("" if value is None else form(value) for value, form in (
                (entry.sent_bytes, format_bytes), (entry.wire_s, format_seconds), (entry.processor_s, format_seconds),
                (entry.hidden_s, format_seconds), (entry.step_s, format_seconds),
            )),
            entry.verdict,
        )  # fmt: skip
    return [table, words]


def _path(scene: CostedLayout) -> Table:
    """Return the table of the critical path: a step gets shorter only if actions or messages on this path do."""
    step = simulate_step(scene.cost, scene.layout)
    segments = critical_path(step.lines[step.last])
    table = Table(
        "pipeline rank", "actions", "takes", "then waits for the message", title="Critical path of the slowest replica"
    )
    for number, leg in enumerate(segments):
        if MOST_LEGS // 2 <= number < len(segments) - MOST_LEGS // 2:
            if number == MOST_LEGS // 2:
                table.add_row("…", f"{len(segments) - MOST_LEGS} legs more", "", "")
            continue
        following = segments[number + 1].waited if number + 1 < len(segments) else None
        waits = "" if following is None else format_seconds(following)
        table.add_row(str(leg.rank), _actions(leg), format_seconds(leg.end - leg.start), waits)
    after = max(step.all_reduced_at(rank) for rank in range(scene.layout.pp)) - step.lines[step.last].makespan
    table.add_row("all", "sums over replicas", format_seconds(after), "")
    table.add_row("all", "norm and optimizer", format_seconds(step.update), "")
    return table


def _actions(leg: PathSegment) -> str:
    first, last = leg.actions[0], leg.actions[-1]
    return str(first) if first == last else f"{first} … {last} ({len(leg.actions)})"


def _memory(plan: Plan, topology: Topology, usable: float) -> Table:
    title = f"Memory ({usable * 100:g} % may be used, marked |)"
    table = Table("device", "predicted", "memory", "share", "", title=title)
    for place, need in (plan.predicted.memory_bytes if plan.predicted else {}).items():
        memory = topology.device(place).memory_bytes
        if memory is None:
            table.add_row(place, format_bytes(need), "not measured")
            continue
        table.add_row(
            place, format_bytes(need), format_bytes(memory), f"{need / memory:.0%}", _bar(need / memory, usable)
        )
    return table


def _bar(share: float, mark: float | None = None) -> str:
    filled = min(BAR, round(share * BAR))
    letters = list("█" * filled + "·" * (BAR - filled))
    if mark is not None:
        letters.insert(round(mark * BAR), "|")
    return "".join(letters)


def _rejected(rejected: Sequence[Rejected]) -> Table:
    table = Table("instead", "a step would be", "because", title="What lost")
    for entry in rejected:
        slower = "cannot run" if entry.delta_s is None else format_delta(entry.delta_s)
        table.add_row(entry.change, slower, entry.reason)
    return table
