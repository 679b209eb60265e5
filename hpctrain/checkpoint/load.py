"""Loads checkpoints into any plan; torch.distributed.checkpoint (DCP) reads the tensors.

Each file that any rank needs is hashed by one of the ranks that need it. If a hash is wrong, all ranks fail.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from hpctrain.base.errors import CheckpointError, DamagedCheckpointError
from hpctrain.checkpoint import published
from hpctrain.checkpoint.dcp_errors import causes_of, last_line, quiet_alone
from hpctrain.records.history.manifest import FileEntry


class CheckpointReader(dcp.FileSystemReader):
    """Reader of one checkpoint's folder for several calls. Nothing else reads tensors of a checkpoint.

    A file is opened only if owner, mode and size are right. The list of tensors (the file `.metadata`) is used only
    with the right hash. It is read once: in a large checkpoint, that takes as long as reading a tensor.

    Every other file is hashed once, in the first `load` that needs it, by one of the ranks that need it, so that each
    rank hashes about the same number of bytes. No rank reads a tensor before all ranks have checked their hashes.
    """

    _metadata: Metadata | None = None

    def __init__(self, path: Path, hashed: bool = False) -> None:
        """Open the checkpoint.

        Args:
            path: the checkpoint's folder.
            hashed: whether the hashes of all files have just been checked (`published.verify`), so that `load` does not
                check them again.

        Raises:
            DamagedCheckpointError: the manifest is missing or wrong.
            CheckpointError: this process has no memory or no descriptors left.
        """
        super().__init__(path)
        self._group: dist.ProcessGroup | None = None
        with _named(path):
            self.manifest = published.read_manifest(path)
        self._folder = path
        self._entries = {entry.name: entry for entry in self.manifest.files}
        self._hashed = set(self._entries) if hashed else {published.METADATA}
        self.fs = _CheckpointFileSystem(path, self._entries)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            with _named(self._folder):
                self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks, each with the names of the files that the rank hashes. DCP calls this on one
        rank."""
        readers: dict[str, list[int]] = {}
        for rank, plan in enumerate(plans):
            for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
                readers.setdefault(name, []).append(rank)
        sizes = {name: entry.size_bytes for name, entry in self._entries.items() if name not in self._hashed}
        shares = share_files({name: readers[name] for name in readers.keys() & sizes.keys()}, sizes, len(plans))
        self._hashed |= readers.keys()
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self._check_hashes(plan.storage_data)
        return super().read_data(plan, planner)

    def _check_hashes(self, names: list[str]) -> None:
        """Hash the files `names`, this rank's share, and wait until the other ranks have hashed theirs. Collective.

        Raises:
            CheckpointError: a file is wrong or cannot be read, on this rank or another one.
        """
        error: CheckpointError | None = None
        try:
            for name in names:
                published.check_hash(self._folder, self._entries[name])
        except CheckpointError as caught:
            error = caught
        errors = [error]
        if self._group is not None:
            errors *= dist.get_world_size(self._group)
            dist.all_gather_object(errors, error, group=self._group)
        for error in errors:
            if error is not None:
                raise error

    def entries(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return name without the prefix -> shape and dtype, for the tensors whose names begin with a prefix.

        Raises:
            CheckpointError: the list of tensors is damaged or cannot be read.
        """
        return {
            name.removeprefix(prefix): entry
            for name, entry in self.read_metadata().state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def load(self, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Load the checkpoint into `tensors` in place. Collective. First, the ranks hash the files that they need and
        that this reader has not hashed before. Then each rank reads the parts that its tensors need.

        Args:
            tensors: this rank's part of the state, by name.
            group: the ranks that load; None: this process alone.

        Raises:
            DamagedCheckpointError: this rank or another one has found that a file is not what was written.
            CheckpointError: a tensor is missing, has another shape, or cannot be read.
        """
        self.read_metadata()  # DCP would hide that the file is damaged
        self._group = group
        try:
            with quiet_alone():
                dcp.load(tensors, storage_reader=self, process_group=group, no_dist=group is None)
        except dcp.api.CheckpointException as error:
            # torch's class does not derive from Exception, so `except Exception` would not catch it.
            causes = causes_of(error)
            damage = next((cause for cause in causes.values() if isinstance(cause, DamagedCheckpointError)), None)
            if damage is not None:
                raise DamagedCheckpointError(f"{self._folder.name}: {damage}") from None
            raise CheckpointError(f"{self.path}: cannot load: {last_line(causes[min(causes)])}") from None

    def load_with_prefix(self, prefix: str, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """Return name without the prefix -> whole tensor, on the CPU, for the tensors whose names begin with a prefix.
        Collective; each rank of `group` may give another prefix.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in self.entries(prefix).items()
        }
        self.load({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, group)
        return tensors


def share_files(readers: Mapping[str, Sequence[int]], sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Return the names of the files that each rank hashes: each file once, by a rank that reads it. Files are assigned
    from the largest to the smallest, each to the one of its readers that has the fewest bytes so far.

    Args:
        readers: name of a file -> the ranks that read it.
        sizes: name of a file -> its bytes.
        ranks: number of ranks.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(readers, key=lambda name: (-sizes[name], name)):
        rank = min(readers[name], key=lambda rank: (loads[rank], rank))
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return shares


class _CheckpointFileSystem(FileSystem):
    """The files of one checkpoint, as DCP opens them: only those in the manifest, and only after the checks of
    `published`."""

    def __init__(self, folder: Path, entries: Mapping[str, FileEntry]) -> None:
        self._folder = folder
        self._entries = entries

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        entry = self._entries.get(Path(path).name)
        if entry is None:
            raise DamagedCheckpointError(f"{Path(path).name} is not in its manifest")
        if entry.name == published.METADATA:  # DCP unpickles it
            yield io.BytesIO(published.read_file(self._folder, entry))
        else:
            with published.open_file(self._folder, entry) as descriptor, open(descriptor, "rb", closefd=False) as file:
                yield file


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Put the checkpoint's name before the text of a DamagedCheckpointError."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{folder.name}: {error}") from None
