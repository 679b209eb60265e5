"""Tables about a run as a whole: its figures, attempts, checkpoints, ranks, energy, software."""

from __future__ import annotations

from hpctrain.base.units import format_bytes, format_count, format_seconds, format_si
from hpctrain.records.history.provenance import attempt_values
from hpctrain.records.history.run_log import Event
from hpctrain.report.event_text import describe_event
from hpctrain.report.html.run_view import RunView
from hpctrain.report.html.tables.words import ABSENT, or_absent
from hpctrain.report.percentiles import PERCENTILES, step_time_percentiles
from hpctrain.report.rank_times import slowness
from hpctrain.report.summaries import FAULTS, loss_words, robustness, steady_mfu, steady_step_time, steady_tokens_per_s


def headline(view: RunView) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the report, each as (label, value, note)."""
    status, steady = view.status, "median, without first steps"
    tokens_per_s, mfu = steady_tokens_per_s(view.rows), steady_mfu(view.rows)
    figures = [
        ("Steps", f"{status.step} of {status.steps}", f"{format_seconds(status.eta_s)} left" if status.eta_s else ""),
        ("Loss", or_absent(status.loss, "{:.4f}".format), ", ".join(loss_words(status.valid_losses))),
        ("Throughput", f"{format_count(tokens_per_s)} tokens/s" if tokens_per_s else ABSENT, steady),
        *([] if mfu is None else [("MFU", f"{mfu:.1%}", "share of the GPUs' data sheets, median")]),
        ("Step time", or_absent(steady_step_time(view.rows), format_seconds), steady),
        ("Time", or_absent(view.elapsed_s, format_seconds), "from the first line written to the last"),
        ("Tokens", format_count(sum(row.tokens for row in view.history)), "in the steps that count"),
        ("Recoveries", str(status.recoveries), _recovery_times(view)),
        ("Lost steps", str(status.lost_steps), "done twice because of a fault"),
    ]
    if (score := robustness(view.rows)) is not None:
        figures.append(("Robustness", f"{score[0]:.3f}", f"1 − std/mean of step time, last {score[1]} steps"))
    return figures


def _recovery_times(view: RunView) -> str:
    times = [recovery.seconds for recovery in view.recoveries if recovery.seconds is not None]
    if view.recoveries and not view.recoveries[-1].done:
        return "one is under way" if view.status.state == "recovering" else "the last fault was not recovered from"
    return f"slowest {format_seconds(max(times))}" if times else ""


def submitted_with(view: RunView) -> list[tuple[str, str]]:
    """Return rows (name, value) about what the run was submitted with; [] for a run of an earlier hpctrain."""
    provenance = view.provenance
    if provenance is None:
        return []
    software, code, image = provenance.software, provenance.code, provenance.image
    uncommitted = ", with changes that were not committed" if code is not None and code.dirty else ""
    rows = [
        ("submitted", provenance.created),
        ("hpctrain", f"{software.hpctrain}{f' ({software.hpctrain_commit})' if software.hpctrain_commit else ''}"),
        ("your code", f"commit {code.commit}{uncommitted}" if code is not None else None),
        ("image", " ".join(filter(None, [image.path, image.id and f"(id {image.id})"])) if image is not None else None),
        ("Slurm", provenance.slurm),
        ("packages", f"{len(provenance.packages)}, in requirements.lock: pip install -r requirements.lock"),
    ]
    return [(name, value) for name, value in rows if value is not None]


MOST_RANKS = 20
"""Most ranks of the table of ranks; of more, those that compute longest are shown."""


def rank_rows(view: RunView) -> list[list[str]]:
    """Return rows about the ranks in the last steps, the one that computes longest first: (rank, device, stages,
    computes, waits for stages, waits for sums, sums hidden behind computation, waits for all ranks, factor by which it
    computes longer than its peers). Times are those of a step."""
    rows, ratios = sorted(view.rank_rows, key=lambda row: -row.compute_s)[:MOST_RANKS], slowness(view.rank_rows)
    return [
        [
            str(row.rank), row.device, ", ".join(map(str, row.stages)),
            *map(format_seconds, (row.compute_s, row.wait_pp_s, row.wait_dp_s, row.hidden_dp_s, row.wait_world_s)),
            or_absent(ratios.get(row.rank), "{:.2f}".format),
        ]
        for row in rows
    ]  # fmt: skip


def software_by_attempt(view: RunView) -> tuple[list[int], list[tuple[str, list[str]]]]:
    """Return the numbers of the run's attempts, and rows (name, value in each attempt) of their nodes' software and
    devices; several values in an attempt name their nodes."""
    attempts = sorted({line.attempt for line in view.environments})
    columns = [attempt_values(view.environments, attempt) for attempt in attempts]
    names = dict.fromkeys(name for column in columns for name in column)
    return attempts, [(name, [column.get(name, ABSENT) for column in columns]) for name in names]


def mood(event: Event) -> str:
    """Return the style in which the report shows an event: 'fault', 'good' or 'plain'."""
    if event.kind in (*FAULTS, "failed"):
        return "fault"
    return "good" if event.kind in ("recovered", "finished") else "plain"


def verdict(view: RunView) -> str:
    """Return one sentence that says how the run went and what it cost."""
    status, device_hours = view.status, view.device_hours
    tokens = format_count(sum(row.tokens for row in view.history))
    if status.state == "done":
        took = f" in {format_seconds(view.elapsed_s)}" if view.elapsed_s else ""
        parts = [f"Done: {status.step:,} steps, {tokens} tokens{took}"]
    else:
        parts = [f"{status.state.capitalize()}: {status.step:,} of {status.steps:,} steps. {status.reason.rstrip('.')}"]
    if status.loss is not None:
        parts.append(", ".join([f"loss {status.loss:.4f}", *loss_words(status.valid_losses)]))
    if device_hours is not None:
        share = f"{device_hours.share('useful'):.0%}".replace("%", " %")
        parts.append(f"{device_hours.total:.3g} {device_hours.unit}, {share} of them in useful steps")
    return "; ".join(parts) + "."


def attempts(view: RunView) -> list[list[str]]:
    """Return rows (attempt, job, nodes, waited before it, took, how it ended) of the run's attempts.

    The first attempt waited from the submission to its start, others from the end of the attempt before them.
    """
    rows = []
    before_s = view.submitted_s
    for span in view.spans:
        waited = None if before_s is None else max(0.0, span.start_s - before_s)
        ended = " – ".join(str(span.values[key]) for key in ("class", "reason") if span.values.get(key))
        rows.append([
            str(span.values.get("attempt", ABSENT)), str(span.values.get("job_id") or "local"), str(len(span.nodes)),
            or_absent(waited, format_seconds), format_seconds(span.end_s - span.start_s), ended or "in progress",
        ])  # fmt: skip
        before_s = span.end_s
    return rows


MOST_CHECKPOINTS = 12
"""Most rows of the table of checkpoints: the newest ones."""


def checkpoints(view: RunView) -> list[list[str]]:
    """Return rows (step, after the start, took, size, what) of the newest checkpoints, also of those that were not
    saved."""
    rows = []
    for event in [event for event in view.events if event.kind in ("checkpoint_saved", "checkpoint_skipped")]:
        data, saved = event.data, event.kind == "checkpoint_saved"
        size = data.get("size_bytes", data.get("bytes"))
        rows.append([
            str(data.get("step", ABSENT)), "+" + format_seconds(max(0.0, event.time_s - (view.start_s or 0.0))),
            or_absent(data.get("seconds"), format_seconds), or_absent(size, format_bytes),
            "saved" if saved else describe_event(event),
        ])  # fmt: skip
    return rows[-MOST_CHECKPOINTS:]


def energy(view: RunView) -> list[tuple[str, str]]:
    """Return rows (name, value) of the energy of the run; [] if none could be read."""
    used = view.energy
    if used is None:
        return []
    rows = [
        ("all attempts", f"{used.total_j / 3.6e6:.4g} kWh"),
        ("GPUs", None if used.gpu_j is None else f"{used.gpu_j / 3.6e6:.4g} kWh"),
        ("machines without their GPUs", None if used.host_j is None else f"{used.host_j / 3.6e6:.4g} kWh"),
        ("in useful steps", f"{used.steps_j / used.total_j:.1%}".replace("%", " %") if used.total_j else None),
        ("a step", None if used.step_j is None else format_si(used.step_j, "J")),
        ("a token", None if used.token_j is None else format_si(used.token_j, "J")),
        ("carbon dioxide equivalent", None if used.carbon_g is None else f"{used.carbon_g / 1000:.4g} kg"),
    ]
    return [(name, value) for name, value in rows if value is not None]


def percentiles(view: RunView) -> list[tuple[str, str]]:
    """Return rows (percentile, seconds) of the step times; [] without steps."""
    return [
        (name, format_seconds(seconds))
        for name, seconds in zip(PERCENTILES, step_time_percentiles(view.history), strict=False)
    ]


MOST_EVENTS = 200
"""Most events of the table: with more, the first 20 and the newest ones."""
FIRST_EVENTS = 20


def shown_events(view: RunView) -> list[Event]:
    """Return the events of the table: all, or the first `FIRST_EVENTS` and the newest ones, `MOST_EVENTS` together."""
    if len(view.events) <= MOST_EVENTS:
        return view.events
    return view.events[:FIRST_EVENTS] + view.events[FIRST_EVENTS - MOST_EVENTS :]


def valid_below_training(view: RunView) -> str:
    """Return why the newest validation loss is below the training loss; '' where it is not.

    The training loss is the mean of as many steps before the validation as a validation has batches, at least 10.
    """
    validated = next((row for row in reversed(view.history) if row.valid_loss is not None), None)
    if validated is None or validated.valid_loss is None:
        return ""
    count = max(10, view.run.validation.batches)
    before = [row.loss for row in view.history if validated.step - count < row.step <= validated.step]
    if validated.valid_loss >= sum(before) / len(before):
        return ""
    return (
        f"After step {validated.step:,} the validation loss is below the training loss. That is no error: the training "
        "loss is that of the weights before each step's update, while the validation loss is that of the weights after "
        "it, and the held-out text may be easier, as it is another and a smaller sample."
    )


MOST_LAYERS = 100


def layers(view: RunView) -> list[list[str]]:
    """Return rows (layer, numbers, variance of a number of its gradient, gradient density, energy kept) of the first
    `MOST_LAYERS` layers; [] where none was measured."""
    return [
        [
            layer.layer, format_count(layer.numbers), or_absent(layer.gradient_variance, "{:.3g}".format),
            or_absent(layer.gradient_density, "{:.2%}".format), or_absent(layer.energy_kept, "{:.1%}".format),
        ]
        for layer in view.layers[:MOST_LAYERS]
    ]  # fmt: skip


MOST_CONNECTIONS = 20
"""Most rows of the table of connections: those that carried most."""


def connections(view: RunView) -> list[list[str]]:
    """Return rows (node, address, bytes, bytes a second while busy) of what the ranks of each node sent over TCP to
    each address, by the last two windows of metrics-ranks.jsonl, the most bytes first; [] where none was measured."""
    sent: dict[tuple[str, str], tuple[int, float]] = {}
    for row in (row for window in view.rank_history.windows[-2:] for row in window):
        for peer in row.traffic or []:
            ends = row.device.split(":")[0], peer.address
            before = sent.get(ends, (0, 0.0))
            sent[ends] = before[0] + peer.sent_bytes, before[1] + peer.busy_s
    largest = sorted(sent.items(), key=lambda item: -item[1][0])[:MOST_CONNECTIONS]
    return [
        [*ends, format_bytes(size), format_si(size / busy_s, "B/s") if busy_s else ABSENT]
        for ends, (size, busy_s) in largest
    ]
