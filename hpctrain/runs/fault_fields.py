"""Finds in the events of an attempt which faults occurred on which nodes, and whether nodes have to be measured again.
All functions are pure.

For a hardware fault its node is blamed at once. For a program fault the program is blamed, unless the fault occurred on
the same node alone in two attempts; exceptions are the same fault if they have the same class and place. That node is
then a suspect: the next attempt probes again, and the node is blamed only if the probe finds it bad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_NO_PROGRESS, EXIT_RESUMABLE
from hpctrain.records.history.fault import EXCEPTION, Fault, fault_named
from hpctrain.records.history.run_log import Event, nodes_excluded_by_probe


def faults_by_node(events: Sequence[Event]) -> dict[str, Fault]:
    """Return {node: the first fault that its workers reported in an attempt}; a fault for which the node or its device
    is to blame takes precedence.

    Args:
        events: events of the attempt.
    """
    shown: dict[str, Fault] = {}
    for event in events:
        if event.kind not in ("worker_died", "failed") or not isinstance(event.data.get("fault"), str):
            continue
        node, fault = event.data.get("node", event.node), fault_named(event.data["fault"])
        if node not in shown or (fault.names_a_node and not shown[node].names_a_node):
            shown[node] = fault
    return shown


def exceptions_by_node(events: Sequence[Event]) -> dict[str, str]:
    """Return {node: class and place of the first exception that its workers reported in an attempt}, such as 'KeyError
    at code/gpt.py:31 in forward'. Only errors count whose fault is `exception`; the place is absent if it is unknown.

    Args:
        events: events of the attempt.
    """
    shown: dict[str, str] = {}
    for event in events:
        error = event.data.get("error")
        if event.kind in ("worker_died", "failed") and event.data.get("fault") == EXCEPTION and isinstance(error, dict):
            words = [str(error[key]) for key in ("kind", "where") if error.get(key)]
            shown.setdefault(event.data.get("node", event.node), " at ".join(words))
    return shown


def suspect_node(history: Sequence[Mapping[str, str]]) -> str | None:
    """Return the node that is a suspect after the newest attempt; None if there is none.

    A node is a suspect if it alone had a fault in the newest attempt, the table of faults blames the user for this
    fault, and at least one earlier attempt had the same fault, each of them on this node alone.

    Args:
        history: {node: name of its fault, or class and place of its exception} for each attempt since the last suspect
            was named; newest last.
    """
    if not history or len(history[-1]) != 1:
        return None
    node, name = next(iter(history[-1].items()))
    if fault_named(name).is_infrastructure:
        return None
    earlier = [{place for place, other in shown.items() if other == name} for shown in history[:-1]]
    earlier = [nodes for nodes in earlier if nodes]
    return node if earlier and all(nodes == {node} for nodes in earlier) else None


def confirmed_suspects(events: Sequence[Event], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the suspects of earlier attempts that the probe of an attempt found bad, sorted.

    Args:
        events: events of the attempt.
        before: lines of attempts.jsonl of the earlier attempts.
    """
    return sorted(nodes_excluded_by_probe(events) & {line["suspect"] for line in before if "suspect" in line})


def attempt_fault_fields(events: Sequence[Event], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of an attempt's line in attempts.jsonl that describe its faults; empty fields are absent.

    The fields: `faults`, name of the fault by node; `exceptions`, class and place by node, for the fault `exception`;
    `suspect`, the suspected node; `retest`, why the nodes are measured again; `confirmed`, suspects of earlier attempts
    that the attempt's probe found bad.

    Args:
        events: events of the attempt.
        before: lines of attempts.jsonl of all earlier attempts.
    """
    shown = faults_by_node(events)
    faults = {node: fault.name for node, fault in shown.items()}
    exceptions = {node: error for node, error in exceptions_by_node(events).items() if faults.get(node) == EXCEPTION}
    last = max((index for index, line in enumerate(before) if "suspect" in line), default=-1)
    earlier = [{**line.get("faults", {}), **line.get("exceptions", {})} for line in before[last + 1 :]]
    suspect = suspect_node([*earlier, {**faults, **exceptions}])
    fields = {
        "faults": faults,
        "exceptions": exceptions,
        "suspect": suspect,
        "retest": _retest_reason(events, shown, suspect),
        "confirmed": confirmed_suspects(events, before),
    }
    return {name: value for name, value in fields.items() if value}


def _retest_reason(events: Sequence[Event], shown: Mapping[str, Fault], suspect: str | None) -> str | None:
    if suspect is not None:
        return f"{suspect} alone showed this in two attempts: {shown[suspect].words}"
    named = [f"{node} had this: {fault.words}" for node, fault in sorted(shown.items()) if fault.names_a_node]
    if named:
        return "; ".join(named)
    ends = [event.data for event in events if event.kind == "failed"]
    if any(data.get("exit_code") in (EXIT_NO_PROGRESS, EXIT_INFRASTRUCTURE) for data in ends):
        return "nodes or the network failed"
    if any(data.get("exit_code") == EXIT_RESUMABLE for data in ends):
        return "nodes were lost"
    return None
