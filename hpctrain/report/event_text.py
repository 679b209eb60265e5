"""Events as sentences, for the terminal, `hpctrain status` and the report."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_NO_PROGRESS, EXIT_RESUMABLE, FileError
from hpctrain.base.json_text import parse_json
from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.records.history.run_log import Event
from hpctrain.report.summaries import restored_step

_EXIT_WORDS = {
    EXIT_RESUMABLE: "can go on",
    EXIT_INFRASTRUCTURE: "fault of the machine",
    EXIT_NO_PROGRESS: "no progress",
}
"""Meaning of a worker's exit codes other than 0 (done); a code that is missing means an error in the worker's
program."""

_EVENT = f'{{"schema": "hpctrain.{Event.schema_kind}/'


def describe_event(event: Event) -> str:
    """Return the event as a sentence, without its time and without a full stop."""
    phrase = _PHRASES.get(event.kind)
    text = phrase(event) if phrase else ""
    return text or event.reason.rstrip(".") or event.kind.replace("_", " ")


def log_line_text(line: str) -> str:
    """Return a line of a log for a person: an event, which agents print as JSON, as a sentence; any other line
    unchanged."""
    if not line.startswith(_EVENT):
        return line
    try:
        return describe_event(Event.from_json(parse_json(line)))
    except (ValueError, FileError):
        return line


def signal_name(value: Any) -> str:
    """Return the name of a signal given by number or name: 9 -> 'SIGKILL'; 'signal N' for an unknown number."""
    if isinstance(value, int):
        try:
            return signal.Signals(value).name
        except ValueError:
            return f"signal {value}"
    return str(value)


def _worker_died(event: Event) -> str:
    data = event.data
    who = f"worker of {data.get('node', event.node)}"
    if data.get("rank") is not None:
        who += f" (rank {data['rank']})"
    at = f" in step {data['step']}, {data['operation']}" if data.get("operation") else ""
    if data.get("signal") is not None:
        return f"{who} was killed ({signal_name(data['signal'])}){at}"
    if data.get("exit_code") is not None:
        meaning = _EXIT_WORDS.get(data["exit_code"])
        return f"{who} ended with exit code {data['exit_code']}" + (f" ({meaning})" if meaning else "") + at
    return f"{who} ended: {event.reason.rstrip('.')}" if event.reason else f"{who} ended"


def _node_lost(event: Event) -> str:
    if event.data.get("crashed"):
        return ""  # the event's reason has more detail
    return f"node {event.data.get('node', event.node)} was lost"


def _generation_started(event: Event) -> str:
    data = event.data
    members = data.get("members") or []
    step = restored_step(event)
    place = " in memory" if data.get("memory") else ""
    start = f"from step {step}{place}" if step else f"from {data.get('first_weights', 'the seed')}"
    text = f"generation {event.generation} starts {start} on {len(members)} node{'' if len(members) == 1 else 's'}"
    degrees = [f"{axis} {data[axis]}" for axis in ("pp", "dp", "tp") if data.get(axis)]
    return f"{text} ({' × '.join(degrees)})" if degrees else text


def _recovered(event: Event) -> str:
    step = event.data.get("step")
    text = f"training goes on with step {step}" if step is not None else "training goes on"
    seconds = event.data.get("seconds")
    return f"{text}, {format_seconds(seconds)} after the fault was seen" if seconds is not None else text


def _checkpoint_saved(event: Event) -> str:
    data = event.data
    if data.get("step") is None:
        return ""
    text = f"checkpoint of step {data['step']} saved"
    if data.get("seconds") is not None:
        text += f" in {format_seconds(data['seconds'])}"
    size = data.get("size_bytes", data.get("bytes"))
    return f"{text} ({format_bytes(size)})" if size is not None else text


def _finished(event: Event) -> str:
    data = event.data
    if data.get("step") is None:
        return ""
    loss = f" with loss {data['loss']:.4g}" if data.get("loss") is not None else ""
    weights = f", weights {data['weights_sha256'][:16]}" if data.get("weights_sha256") else ""
    return f"finished at step {data['step']}{loss}{weights}"


def _prefixed(prefix: str) -> Callable[[Event], str]:
    return lambda event: f"{prefix}: {event.reason.rstrip('.')}" if event.reason else prefix


_PHRASES: dict[str, Callable[[Event], str]] = {
    "probing": _prefixed("probing"),
    "probed": _prefixed("probed"),
    "data_staged": _prefixed("data on the node"),
    "data_not_staged": _prefixed("no copy of the data"),
    "planned": _prefixed("planned"),
    "replanned": _prefixed("planned again"),
    "adapted": _prefixed("another plan"),
    "adaptation_measured": _prefixed("the plan was judged"),
    "worker_died": _worker_died,
    "worker_hung": _prefixed("nothing moves"),
    "node_lost": _node_lost,
    "node_returned": lambda event: f"node {event.data.get('node', event.node)} came back",
    "generation_started": _generation_started,
    "recovered": _recovered,
    "checkpoint_saved": _checkpoint_saved,
    "checkpoint_skipped": _prefixed("a checkpoint was skipped"),
    "waiting_for_room": _prefixed("no room"),
    "residuals_dropped": _prefixed("residuals dropped"),
    "finished": _finished,
    "notify_failed": _prefixed("nobody was told"),
    "tracker_failed": _prefixed("no more metrics for it"),
    "gpu_unhealthy": _prefixed("a GPU is not well"),
    "failed": _prefixed("failed"),
}
