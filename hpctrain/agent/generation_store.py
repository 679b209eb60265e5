"""How agents agree on a generation: each has one file in the run folder, and only one agent can make its hard link.

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
    """The decided generations of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Generation | None:
        """The last decided generation, or None before the first."""
        files = sorted(self._folder.glob("gen-*.json"))
        return Generation.read(files[-1], owned=True) if files else None

    def decide(self, record: Generation) -> Generation:
        """Make `record` the generation of its number, unless another was first, and return the decided one.

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
