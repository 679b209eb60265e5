"""The state of the lab's nodes and jobs in Slurm: commands that ask for it, and pure functions that parse their
output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.slurm.time import read_moment

_FIELD = re.compile(r"(\w+)=(\S*)")
_JOB_FORMAT = "%i|%j|%P|%T|%N|%r"
_UNHEALTHY = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "UNKNOWN", "NOT_RESPONDING", "ERROR", "FUTURE"}


@dataclass(frozen=True)
class NodeState:
    """The state of a node in Slurm."""

    name: str
    flags: tuple[str, ...]
    """The node's state in Slurm (IDLE, ALLOCATED, MIXED, DOWN, …) and flags such as DRAIN and NOT_RESPONDING."""
    started_s: float | None
    """Start time of the node's slurmd, in seconds since 1970; None before it has registered."""

    @property
    def healthy(self) -> bool:
        """Whether Slurm gives jobs to the node."""
        return bool(self.flags) and not _UNHEALTHY & set(self.flags)

    @property
    def text(self) -> str:
        """The state as sinfo writes it: 'idle', 'down*'."""
        words = [flag.lower() for flag in self.flags if flag != "NOT_RESPONDING"]
        return "+".join(words) + ("*" if "NOT_RESPONDING" in self.flags else "")


def scontrol(layout: LabLayout, *words: str) -> tuple[str, ...]:
    """Return an scontrol command for this lab, independent of SLURM_CONF; its output has times in seconds since
    1970."""
    return ("env", f"SLURM_CONF={layout.slurm_conf}", "SLURM_TIME_FORMAT=%s", layout.slurm.program("scontrol"), *words)


def squeue(layout: LabLayout) -> tuple[str, ...]:
    """Return the squeue command for this lab; `parse_jobs` reads its output."""
    program = layout.slurm.program("squeue")
    return ("env", f"SLURM_CONF={layout.slurm_conf}", program, "--noheader", "--all", f"--format={_JOB_FORMAT}")


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Return the state of each node by name, from the output of `scontrol show node --oneliner`."""
    states = {}
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if "NodeName" not in fields:
            continue
        raw = fields.get("State", "").upper()
        # If a node does not answer, old versions of Slurm put an asterisk behind its state, new ones a flag.
        flags = tuple(word.rstrip("*") for word in raw.split("+")) + (("NOT_RESPONDING",) if "*" in raw else ())
        started = fields.get("SlurmdStartTime", "")
        name = fields["NodeName"]
        states[name] = NodeState(name, tuple(dict.fromkeys(flags)), read_moment(started))
    return states


def parse_jobs(text: str) -> list[dict[str, Any]]:
    """Return the jobs, from the output of the command that `squeue` returns."""
    keys = ("id", "name", "partition", "state", "nodes", "reason")
    return [dict(zip(keys, line.split("|"), strict=True)) for line in text.splitlines() if line.count("|") == 5]


def node_states(machine: Machine, layout: LabLayout) -> dict[str, NodeState]:
    """Return the state of each node; {} while the controller does not answer."""
    done = machine.try_run(scontrol(layout, "show", "node", "--oneliner"))
    return parse_nodes(done.stdout) if done.code == 0 else {}
