"""Lets agents agree on a generation: each generation has one file in the run folder, and only one agent can create it,
by a hard link.

link(2) fails with EEXIST on local file systems and on NFS alike. O_EXCL does not promise this on old NFS, nor does
flock on every parallel file system.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.base.atomic import storage_errors
from hpctrain.records.history.generation import Generation, Member, record_file
from hpctrain.records.plan.plan import Plan


class GenerationStore:
    """The generations that the agents of a run have agreed on, as files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Generation | None:
        """Return the newest generation that the agents agreed on; None before the first generation."""
        files = sorted(self._folder.glob("gen-*.json"))
        return Generation.read(files[-1], owned=True) if files else None

    def decide(self, record: Generation) -> Generation:
        """Publish `record` as the generation with its number, unless another agent was first. Return the record that
        was published first, on which all agents then agree.

        Raises:
            StorageError: the run folder cannot be written.
        """
        self._folder.mkdir(exist_ok=True)
        path = record_file(self._folder, record.number)
        proposal = self._folder / f".proposal-{secrets.token_hex(6)}"
        record.write(proposal)
        with storage_errors(path):
            try:
                os.link(proposal, path)
            except FileExistsError:
                return Generation.read(path, owned=True)
            finally:
                proposal.unlink(missing_ok=True)
        return record


@dataclass(frozen=True)
class Proposal:
    """What the agent that proposes knows about the next generation before it makes the record."""

    number: int
    """Number of the next generation."""
    attempt: int
    """Number of the attempt."""
    members: tuple[Member, ...]
    """Members of the next generation."""
    previous: Generation | None
    """The generation before; None for the first."""
    reason: str
    """Why a new generation begins."""
    failures: int
    """Number of failed generations in a row, as `failures` of `hpctrain.agent.decide` counts them."""
    proposer: str
    """Incarnation of the agent that proposes."""


@dataclass(frozen=True)
class ProposedGeneration:
    """A generation's record that the agents have not agreed on yet."""

    record: Generation
    plan: Plan
    """The plan that the generation runs."""
    announce: Callable[[], None]
    """Writes a new plan to the run folder (`plan.json` or `plan-<generation>.json`, a copy that users may edit), and
    the events about the plan and the checkpoint. Called once if the agents agree on this record, and not for a losing
    proposal."""


class GenerationSource(Protocol):
    """Makes the record of a generation from plans and checkpoints in the run folder."""

    def make(self, proposal: Proposal) -> ProposedGeneration:
        """Return the next generation's record, its plan, and the function that announces them once all agents agree."""

    def newest_checkpoint(self) -> str | None:
        """Return the path of the newest published checkpoint, relative to the run folder; None if there is none."""
