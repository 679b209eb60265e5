"""What `plan --explain` prints: placement, idle devices, time, critical path, memory, and rejected plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Column, Table

from hpctrain.base.units import format_bytes, format_delta, format_seconds
from hpctrain.jobs.data_sheet_time import plan_error_text
from hpctrain.planner.explain import IdleDevices
from hpctrain.planner.layout.plan_conversion import CostedLayout
from hpctrain.planner.simulate.engine import PathSegment, critical_path
from hpctrain.planner.simulate.predict import simulate_step
from hpctrain.records.format.node_name import DeviceId, compress_node_set
from hpctrain.records.plan.codec_spec import CodecFigures
from hpctrain.records.plan.gradient_codec import IntraNode
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.prediction import LEAST_USEFUL_BOUND, Rejected
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.topology.topology import Device, Topology

BAR = 20
"""Characters of a bar that shows a share of 1."""
MOST_LEGS = 10
"""Most rows of the critical path's table; of a longer path only the first and the last rows are shown."""
MOST_CHARACTERS = 80
"""Most characters of a folded list of devices."""
_REJECTED_LEGEND = (
    "A row with degrees, or without a node, is the best plan found of this kind. In other rows only what is named "
    "differs."
)
TERMS = {
    "compute": "computation of the busiest pipeline rank",
    "pipeline_bubble": "ranks wait for the first and last micro-batches",
    "pipeline_send": "messages between stages that computation does not hide",
    "tensor_parallel": "messages between the devices that share a stage (tp)",
    "data_parallel": "all-reduce of gradients over replicas, after the backward",
    "optimizer": "gradient norm and optimizer",
    "total": "the sum",
}
"""Term of the predicted step -> what it is, for a person."""


def explanation(
    plan: Plan, topology: Topology, scene: CostedLayout, usable: float, more: Sequence[Rejected],
    idle: IdleDevices | None,
) -> Group:  # fmt: skip
    """Return the tables that explain a plan, one after the other.

    Args:
        scene: the plan's layout on the topology, with its costs.
        usable: share of a device's memory that a plan may fill.
        more: rejected neighbours besides those in the plan.
        idle: devices that the plan leaves idle; None if there are none.
    """
    devices = {DeviceId.of(node.id, device.id): device for node in topology.nodes for device in node.devices}
    types = {devices[device_id].type: topology.device_types[devices[device_id].type] for device_id in plan.ranks}
    parts: list[Table | str] = [
        _where(plan, devices),
        "4 of 2: in each step, a replica computes 4 micro-batches of 2 sequences. 0-3 stands for 0, 1, 2 and 3. "
        "plan.json has the devices of each single replica.",
        *([] if idle is None else [_idle(idle)]),
        _time(plan),
        *_bound(plan),
        plan_error_text(types),
        *_compression(plan),
        _path(scene),
        "2F5 is the forward pass of stage 2 for micro-batch 5, B the backward pass; I and W are its two halves. The "
        "step becomes shorter only if something on this path does.",
        _memory(plan, devices, usable),
    ]
    rejected = [*plan.rejected, *more]
    if rejected:
        parts += [_rejected(rejected), _REJECTED_LEGEND]
    notes = [f"note: {note}" for note in plan.notes if idle is None or not note.endswith("usable devices stay idle.")]
    return Group(*parts, *_constants(plan.profile), *notes)


def _folded(device_ids: Sequence[DeviceId]) -> str:
    """Return device ids as short text: 'n[1-2]:cuda[0-1]' for cuda0 and cuda1 of n1 and n2; only the first one and the
    number of the others if this text were longer than `MOST_CHARACTERS`."""
    devices: dict[str, list[str]] = {}
    for device_id in device_ids:
        devices.setdefault(device_id.node, []).append(device_id.device)
    nodes: dict[str, list[str]] = {}
    for node, names in devices.items():
        nodes.setdefault(compress_node_set(names), []).append(node)
    text = " ".join(f"{compress_node_set(names)}:{device}" for device, names in nodes.items())
    return text if len(text) <= MOST_CHARACTERS else f"{device_ids[0]} and {len(device_ids) - 1} more"


def _idle(idle: IdleDevices) -> str:
    """Return a paragraph that says which devices stay idle, and what a plan on all devices would take."""
    other = idle.all_used
    text = f"Idle: {len(idle.device_ids)} of {idle.usable} usable devices, {_folded(idle.device_ids)}. "
    if other.delta_s is None:
        return f"{text}No plan uses all {idle.usable}: {other.reason}."
    longer = "longer" if other.delta_s > 0 else "shorter"
    return (
        f"{text}On all {idle.usable}, the fastest plan found, {other.change}, takes "
        f"{format_seconds(abs(other.delta_s))} {longer} a step: {other.reason}."
    )


def _bound(plan: Plan) -> list[str]:
    """Return a sentence that says what the lower bound means; [] without a bound."""
    if plan.predicted is None or plan.predicted.bound_s is None:
        return []
    bound_s, step_s = plan.predicted.useful_bound_s, plan.predicted.step_time_s["total"]
    if bound_s is None:
        return [
            "Lower bound: none is shown, because the one that was found is less than "
            f"{100 * LEAST_USEFUL_BOUND:g} % of the predicted step, and does not say whether another plan is faster."
        ]
    text = (
        "Lower bound: by the same cost model, no plan on these devices, tried or not, takes less than "
        f"{format_seconds(bound_s)} a step, so at most {100 * (1 - bound_s / step_s):.1f} % of this step can be saved"
    )
    return [f"{text}."]


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


def _where(plan: Plan, devices: Mapping[DeviceId, Device]) -> Table:
    """Return the table of replicas and stages. Replicas with as much work on devices of the same types share a row of
    each stage."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, replica in enumerate(plan.replicas):
        types = tuple(devices[row[0]].type for row in replica.devices)
        alike.setdefault((replica.sequences, replica.micro_batches, types), []).append(number)
    devices_column = Column("devices", overflow="fold")
    table = Table("replicas", "micro-batches", "stage", "blocks", devices_column, title="What goes where")
    for numbers in alike.values():
        first = plan.replicas[numbers[0]]
        head = (compress_node_set(map(str, numbers)).strip("[]"), f"{first.micro_batches} of {first.micro_batch}")
        for index, stage in enumerate(plan.stages):
            start, stop = stage.layers
            blocks = [f"{start}-{stop - 1}" if stop - start > 1 else str(start)] if stop > start else []
            blocks = ["embedding"] * (index == 0) + blocks + ["head"] * (index == len(plan.stages) - 1)
            device_ids = [device_id for number in numbers for device_id in plan.replicas[number].devices[index]]
            text = f"{len(device_ids)} × {devices[device_ids[0]].type}: {_folded(device_ids)}"
            table.add_row(*(head if index == 0 else ("", "")), str(index), ", ".join(blocks), text)
    return table


def _time(plan: Plan) -> Table:
    """Return the table of the terms of the predicted step. Terms that take no time have no row."""
    table = Table("term", "seconds", "share", "what it is", title="Predicted time of a step")
    terms = plan.predicted.step_time_s if plan.predicted else {}
    for term, seconds in terms.items():
        if seconds > 0:
            table.add_row(term, format_seconds(seconds), f"{seconds / terms['total']:.0%}", TERMS[term])
    return table


def _compression(plan: Plan) -> list[Table | str]:
    """Return lines about the codec of the gradients: why it was chosen, and its gap of the loss if one was measured.
    If codecs were compared, their table comes first.

    [] if gradients are summed exactly because the run file says so.
    """
    spec = plan.compression[-1]
    if spec.reason is not None:
        words = [f"compression {sums_label(spec.codec.short_label, plan.intra_node)}: {spec.reason}"]
        words += [f"  {group}: {reason}" for group, reason in (spec.group_reasons or {}).items()]
    elif plan.dp == 1 or plan.codec.exact:
        return []
    else:
        words = [f"compression {sums_label(spec.codec.label, plan.intra_node)}, which the planner did not choose"]
    if (gap := spec.codec.loss_gap) is not None:
        words.append(f"loss gap of {spec.codec.label} {gap.figure} (measured at {gap.scene})")
    if not spec.compared:
        return [*words]
    table = Table(
        "sums", "loss gap", "sent a device", "messages", "processor", "beside backward", "mean step", "verdict",
        title="Ways to sum gradients, in the order in which they are tried",
    )  # fmt: skip
    for entry in spec.compared:
        table.add_row(
            sums_label(entry.codec.short_label, entry.intra_node),
            _gap(entry),
            *("" if value is None else form(value) for value, form in (
                (entry.sent_bytes, format_bytes), (entry.wire_s, format_seconds), (entry.processor_s, format_seconds),
                (entry.hidden_s, format_seconds), (entry.step_s, format_seconds),
            )),
            entry.verdict,
        )  # fmt: skip
    return [table, *words]


def _gap(entry: CodecFigures) -> str:
    if entry.predicted_gap is not None:
        return f"{100 * entry.predicted_gap:+.3g} %, assumed"
    return "" if entry.codec.loss_gap is None else entry.codec.loss_gap.figure


def sums_label(label: str, intra_node: IntraNode | None) -> str:
    """Return the label of a codec and, if the replicas of a node sum first, how they do: 'int4, in nodes bf16'."""
    return label if intra_node in (None, "flat") else f"{label}, in nodes {intra_node}"


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
    if step.early_sums_s:
        table.add_row("all", "sums beside these", format_seconds(step.early_sums_s), "")
    table.add_row("all", "sums over replicas", format_seconds(after), "")
    table.add_row("all", "norm and optimizer", format_seconds(step.update), "")
    return table


def _actions(leg: PathSegment) -> str:
    first, last = leg.actions[0], leg.actions[-1]
    return str(first) if first == last else f"{first} … {last} ({len(leg.actions)})"


def _memory(plan: Plan, devices: Mapping[DeviceId, Device], usable: float) -> Table:
    """Return the table of each device's memory. Devices with equal figures share a row."""
    title = f"Memory of a device ({usable * 100:g} % may be used, marked |)"
    table = Table(Column("devices", overflow="fold"), "predicted", "memory", "share", "", title=title)
    alike: dict[tuple[str, ...], list[DeviceId]] = {}
    for device_id, need in (plan.predicted.memory_bytes if plan.predicted else {}).items():
        memory = devices[device_id].memory_bytes
        row: tuple[str, ...] = (format_bytes(need), "not measured")
        if memory is not None:
            row = (format_bytes(need), format_bytes(memory), f"{need / memory:.0%}", _bar(need / memory, usable))
        alike.setdefault(row, []).append(device_id)
    for row, device_ids in alike.items():
        table.add_row(_folded(device_ids), *row)
    return table


def _bar(share: float, mark: float) -> str:
    filled = min(BAR, round(share * BAR))
    letters = list("█" * filled + "·" * (BAR - filled))
    letters.insert(round(mark * BAR), "|")
    return "".join(letters)


def _rejected(rejected: Sequence[Rejected]) -> Table:
    """Return the table of rejected neighbours. Those that cannot run for the same reason share a row."""
    table = Table("instead", "a step would be", "because", title="Plans that were not chosen")
    alike: dict[object, list[Rejected]] = {}
    for number, entry in enumerate(rejected):
        alike.setdefault(number if entry.delta_s is not None else entry.reason, []).append(entry)
    for entries in alike.values():
        first = entries[0]
        slower = "cannot run" if first.delta_s is None else format_delta(first.delta_s)
        table.add_row("; ".join(entry.change for entry in entries), slower, first.reason)
    return table
