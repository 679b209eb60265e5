"""Lets agents agree on a generation: each generation has one file in the run folder, and only one agent can create it,
by a hard link.

link(2) fails with EEXIST on local file systems and on NFS alike. O_EXCL does not promise this on old NFS, nor does
flock on every parallel file system.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hpctrain.base.atomic import storage_errors
from hpctrain.records.history.generation import Generation, record_file


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
