"""Where agents agree: one file a generation in the run folder, made by a hard link, which only one of them can make.

link(2) fails with EEXIST on local file systems and on NFS alike, which neither O_EXCL over old NFS nor flock on every
parallel file system promises.
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
        """Make `record` the generation of its number, unless another was first; the decided one comes back.

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
