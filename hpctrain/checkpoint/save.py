"""Saves checkpoints in the background; torch.distributed.checkpoint (DCP) writes the shards.

Each rank copies its tensors between two steps. A thread with its own process group writes the copy and hashes
the files of the rank. Rank 0 publishes the folder when every rank has finished.

The memory for the copy is allocated once, on that thread while the first steps are computed, and each save only copies
into it. Fresh memory would cost more than the copy, because the kernel maps and clears it page by page. With a CUDA
device the memory is pinned, so that the device copies at the full rate of its link.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import StorageError, Superseded
from hpctrain.base.system.disk_space import check_disk_space
from hpctrain.checkpoint import published
from hpctrain.checkpoint.dcp_errors import failure_reason
from hpctrain.records.history.generation import Fence
from hpctrain.records.history.manifest import FileEntry, Manifest

SURPLUS_BYTES = 1 << 14
"""Bytes of headers, padding and metadata that DCP's format is assumed to add to the file of each rank. For each tensor,
a sixteenth of this number is assumed in addition."""


@dataclass(frozen=True)
class SaveResult:
    """The result of saving a checkpoint of step `step`; `size_bytes` is the size of all ranks' files."""

    step: int
    seconds: float
    """Seconds from the start of the copy to the published folder, or to the error."""
    size_bytes: int = 0
    error: str | None = None
    """Why no checkpoint was published; earlier ones are unchanged. None: it was published."""


class StagingBuffers:
    """Host memory for one copy of this rank's part of the state, by name of the tensor."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Allocate memory for copies of the tensors, by name. This is cheap, because the kernel maps pages only when
        they are written."""
        for name, tensor in tensors.items():
            known = self._buffers.get(name)
            if known is None or not _alike(known, tensor):
                self._buffers[name] = torch.empty_like(tensor.detach(), device="cpu")

    def warm(self, device: torch.device) -> None:
        """Write to all of the reserved memory once, so that the kernel maps it, and pin it for a CUDA device. Call this
        on another thread before the first `copy`.

        Args:
            device: device of the tensors that will be copied.
        """
        memory = [local_part(buffer).zero_() for buffer in self._buffers.values()]
        if device.type == "cuda":
            _lock_in_place(memory, device)

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors in host memory, by name; they are valid until the next call."""
        self.reserve(tensors)
        sources = [local_part(tensor.detach()) for tensor in tensors.values()]
        targets = [local_part(self._buffers[name]) for name in tensors]
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in tensors}


class CheckpointSaver:
    """Saves checkpoints, one at a time, in the background. Every rank has a CheckpointSaver, and all ranks call `save`
    at the same step."""

    def __init__(self, checkpoints: Path, group: dist.ProcessGroup, keep: int, fence: Fence) -> None:
        self._checkpoints = checkpoints
        self._group = group
        self._keep = keep
        self._fence = fence
        self._staging = StagingBuffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._warming: Future[None] | None = None
        self._pending: Future[SaveResult] | None = None
        self._size_bytes: int | None = None

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocate and map the memory for copies of the tensors in the background, so that the first save need not wait
        for it."""
        self._staging.reserve(tensors)
        device = next(iter(tensors.values())).device
        self._warming = self._thread.submit(self._staging.warm, device)

    def save(self, tensors: dict[str, Tensor], manifest: Manifest) -> None:
        """Copy the tensors and begin to write the copy; the tensors may change after this call. An earlier save that
        still runs is waited for first, and its result is dropped.

        Args:
            tensors: this rank's part of the state, by name.
            manifest: the manifest without `files`, which are filled in.

        Raises:
            RuntimeError: in the earlier save, a rank has lost another one (an error of gloo).
        """
        self.finished(wait=True)
        start = time.perf_counter()
        if self._warming is not None:
            self._warming.result()
        copy = self._staging.copy(tensors)
        self._pending = self._thread.submit(self._write, copy, manifest, start)

    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._pending is not None and not self._pending.done()

    def finished(self, wait: bool = False) -> SaveResult | None:
        """Return the result of a save that ended and was not yet returned; None if there is none.

        Args:
            wait: whether to wait for a save that is still being written.

        Raises:
            RuntimeError: in that save, a rank has lost another one (an error of gloo).
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Wait for a running save, and end the writer thread."""
        self._thread.shutdown(wait=True)

    def _write(self, tensors: dict[str, Tensor], manifest: Manifest, start: float) -> SaveResult:
        temporary = self._checkpoints / f".{published.folder_name(manifest.step)}.gen-{manifest.generation}.tmp"
        try:
            self._check_room(tensors, manifest.step)
            files = self._write_shards(tensors, temporary)
            self._on_rank0(lambda: self._publish(temporary, manifest, files))
        except StorageError as error:
            if dist.get_rank(self._group) == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            return SaveResult(manifest.step, time.perf_counter() - start, error=str(error))
        size = self._size_bytes = sum(entry.size_bytes for entry in files)
        return SaveResult(manifest.step, time.perf_counter() - start, size)

    def _check_room(self, tensors: dict[str, Tensor], step: int) -> None:
        """Raise StorageError on every rank if a checkpoint of step `step` does not fit on the disk. Collective; called
        before anything is written."""
        if self._size_bytes is None:
            self._size_bytes = self._expected_bytes(tensors)
        size_bytes, ranks = self._size_bytes, dist.get_world_size(self._group)

        def look() -> None:
            with storage_errors(self._checkpoints):
                self._checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_disk_space(self._checkpoints, size_bytes, f"a checkpoint of step {step}", files=ranks)

        self._on_rank0(look)

    def _expected_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Return the expected bytes of a checkpoint of the whole state, over all ranks. A tensor counts once, even if
        several ranks hold it or parts of it. Collective."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(everyone, sizes, group=self._group)
        whole = {name: size for sizes in everyone for name, size in sizes.items()}
        return sum(whole.values()) + SURPLUS_BYTES * len(everyone) + SURPLUS_BYTES * len(whole) // 16

    def _write_shards(self, tensors: dict[str, Tensor], temporary: Path) -> list[FileEntry]:
        self._on_rank0(lambda: _make_folder(temporary))
        writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except dcp.api.CheckpointException as error:
            raise StorageError(failure_reason(error, temporary)) from error
        return self._describe(temporary)

    def _describe(self, temporary: Path) -> list[FileEntry]:
        """Hash the files that this rank wrote to the folder `temporary`. Return the manifest's entries of all ranks'
        files. Collective.

        Raises:
            StorageError: this rank or another one cannot read a file that it wrote.
        """
        rank = dist.get_rank(self._group)
        prefixes = (f"__{rank}_", published.METADATA) if rank == 0 else (f"__{rank}_",)
        entries: list[dict[str, object]] | str
        try:
            paths = [path for path in sorted(temporary.iterdir()) if path.name.startswith(prefixes)]
            entries = [published.describe_file(path).model_dump() for path in paths]
        except OSError as error:
            entries = f"{error.filename or temporary}: rank {rank} cannot read what it wrote: {error.strerror or error}"
        everyone: list[list[dict[str, object]] | str] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(everyone, entries, group=self._group)
        described: list[FileEntry] = []
        for entries in everyone:
            if isinstance(entries, str):
                raise StorageError(entries)
            described += [FileEntry.model_validate(entry) for entry in entries]
        return described

    def _publish(self, temporary: Path, manifest: Manifest, files: list[FileEntry]) -> None:
        final = published.publish(temporary, manifest.model_copy(update={"files": files}), self._fence)
        self._fence.check()
        with contextlib.suppress(OSError):  # the next checkpoint's save removes what this one cannot list
            published.prune(self._checkpoints, self._keep, final)

    def _on_rank0(self, act: Callable[[], object]) -> None:
        """Run `act` on rank 0 alone, and wait for its end on every rank. Collective.

        If `act` raises StorageError, Superseded or OSError, every rank raises StorageError, so that all ranks give up
        together.
        """
        message: list[str | None] = [None]
        if dist.get_rank(self._group) == 0:
            try:
                act()
            except (StorageError, Superseded) as error:
                message = [str(error)]
            except OSError as error:
                message = [f"{error.filename or self._checkpoints}: {error.strerror or error}"]
        source = dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(message, src=source, group=self._group)
        if message[0] is not None:
            raise StorageError(message[0])


def _make_folder(path: Path) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot make the folder: {error.strerror}") from error


def _lock_in_place(tensors: list[Tensor], device: torch.device) -> None:
    """Pin the memory of CPU tensors for fast copies from the CUDA device. If the system refuses (a limit on locked
    memory), print a message; copies are then only slower."""
    # A thread starts on GPU 0, and its first CUDA call would open a context there, which takes memory.
    torch.cuda.set_device(device)
    cuda = torch.cuda.cudart()
    for tensor in tensors:
        if tensor.numel() == 0:
            continue  # a rank may hold no part of a parameter
        code = int(cuda.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0))
        if code != 0:
            print(
                f"hpctrain worker: memory for checkpoints is not locked, so copies are slower: CUDA error {code}",
                file=sys.stderr,
            )
            return


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    a, b = local_part(buffer), local_part(tensor)
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
