"""`python -m hpctrain.worker export`: writes a run's model, whatever plan saved its checkpoint, as safetensors files
or as a folder of torch's distributed checkpoints (DCP).

The request is JSON on the command line, the reply is JSON on stdout: {"files": …} or {"error": …}.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.atomic import storage_errors, sync, write_json
from hpctrain.base.errors import HpctrainError
from hpctrain.base.system.kernel import die_with_parent
from hpctrain.checkpoint.save_lazily import save_lazily
from hpctrain.hf.config import export_architecture
from hpctrain.hf.output import ExportFormat
from hpctrain.hf.safetensors_layout import DTYPES, PlacedTensor, lay_out, share_tensors
from hpctrain.hf.tensors import BYTES, INDEX, HfTensor, assign_to_shards, index_of
from hpctrain.model.hf_weights import to_hf_tensor
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.code_copy import CODE_FOLDER, import_code_first
from hpctrain.worker.forked_ranks import run_forked
from hpctrain.worker.verbs.json_reply import json_reply
from hpctrain.worker.weights import Weights, weights_of


@dataclass(frozen=True)
class ExportRequest:
    """A request to export a model: which one, to which folder, in which dtype, and in how many processes."""

    folder: str
    """The run folder."""
    checkpoint: str | None
    """Path of a verified checkpoint folder; None: the model before training."""
    output: str
    """Existing folder to which the files with tensors are written."""
    dtype: str
    """Dtype of the files: float32, bfloat16 or float16."""
    shard_bytes: int
    """Size limit of one safetensors file in bytes. A file is larger only if a single tensor is."""
    processes: int = 1
    """Number of processes, which share the tensors."""
    file_format: ExportFormat = "hf"
    """Format of the files with tensors."""


def main(argv: list[str]) -> int:
    """Export the model that the request names. Return 0, or the exit code of an error that the reply describes."""
    die_with_parent(os.getppid())
    question = ExportRequest(**json.loads(argv[0]))
    import_code_first(Path(question.folder) / CODE_FOLDER)
    return json_reply(lambda: {"files": export(question)})


def export(question: ExportRequest) -> list[str]:
    """Write the model's weights, and return the names of the files with tensors. A process holds one tensor at a time.

    Raises:
        InputError: the model before training cannot be made.
        CheckpointError: the checkpoint cannot be loaded.
        StorageError: a file cannot be written.
        HpctrainError: a weight is not finite in the dtype, or a process failed. With several processes, also where a
            process cannot read the checkpoint or write a file.
    """
    run = run_of(Path(question.folder))
    weights = weights_of(run, None if question.checkpoint is None else Path(question.checkpoint))
    # A user's factory has built its whole model in this process, and perhaps started threads, which would not survive a
    # fork.
    processes = 1 if question.checkpoint is None and isinstance(run.spec(), ImportedSpec) else question.processes
    write = _write_dcp if question.file_format == "dcp" else _write_safetensors
    return write(_tensors(run, weights), weights, question, processes)


def _write_safetensors(tensors: list[HfTensor], weights: Weights, question: ExportRequest, processes: int) -> list[str]:
    """Write safetensors files, and for several files an index, and return the names of the files with tensors."""
    named = assign_to_shards(tensors, BYTES[question.dtype], question.shard_bytes)
    output, dtypes = Path(question.output), dict.fromkeys((tensor.name for tensor in tensors), DTYPES[question.dtype])
    files = {name: lay_out(name, part, dtypes) for name, part in named.items()}
    places = [placed for file in files.values() for placed in file.tensors]
    for name, file in files.items():
        with storage_errors(output / name), (output / name).open("wb") as opened:
            opened.write(file.header)
            opened.truncate(file.size_bytes)
    shares = share_tensors(places, processes)
    run_forked(processes, lambda rank: _write(shares[rank], weights, question))
    for name in files:
        with storage_errors(output / name):
            sync(output / name)
    if len(files) > 1:
        write_json(output / INDEX, index_of(named, sum(placed.size_bytes for placed in places)))
    return list(files)


def _write_dcp(tensors: list[HfTensor], weights: Weights, question: ExportRequest, processes: int) -> list[str]:
    """Write a DCP folder, and return the names of its files."""
    size = BYTES[question.dtype]
    shares = share_tensors([PlacedTensor(tensor, "", 0, tensor.count * size) for tensor in tensors], processes)
    with tempfile.TemporaryDirectory(prefix="hpctrain-export-") as meeting:
        run_forked(processes, lambda rank: _save_share(rank, shares, weights, question, Path(meeting) / "store"))
    made = Path(question.output).iterdir()
    return sorted(path.name for path in made if path.name == ".metadata" or path.suffix == ".distcp")


def _save_share(
    rank: int, shares: list[list[PlacedTensor]], weights: Weights, question: ExportRequest, meeting: Path
) -> None:
    """Write the tensors of a rank as a part of a DCP folder. The ranks meet at the file `meeting`."""
    if len(shares) > 1:
        store = dist.FileStore(str(meeting), len(shares))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shares))
    dtype: torch.dtype = getattr(torch, question.dtype)
    share = {placed.tensor.name: placed.tensor for placed in shares[rank]}
    shapes = {name: tensor.shape for name, tensor in share.items()}
    save_lazily(Path(question.output), shapes, dtype, lambda name: _whole(share[name], weights, dtype))


def _tensors(run: Run, weights: Weights) -> list[HfTensor]:
    """Return the tensors of an export. They have the names of transformers' class for the model, or, if the model is
    the user's own (`model.import`), the names in the user's code."""
    spec = run.spec()
    if isinstance(spec, ImportedSpec):
        return [HfTensor(name, shape, (name,)) for name, shape in weights.shapes.items()]
    return list(export_architecture(run.model.hf_model, spec).tensors(spec))


def _write(share: list[PlacedTensor], weights: Weights, question: ExportRequest) -> None:
    """Write tensors to their places in the files."""
    dtype: torch.dtype = getattr(torch, question.dtype)
    for placed in share:
        whole = _whole(placed.tensor, weights, dtype)
        path = Path(question.output) / placed.file
        with storage_errors(path), path.open("r+b", buffering=0) as file:
            file.seek(placed.offset)
            rest = whole.flatten().view(torch.uint8).numpy().data
            while rest:
                rest = rest[file.write(rest) :]


@torch.no_grad()
def _whole(tensor: HfTensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the export, made of the parameters that it holds.

    Raises:
        HpctrainError: it has numbers that are not finite.
    """
    whole = to_hf_tensor(tensor, [weights.read(name) for name in tensor.parameters]).to(dtype)
    _check_finite(whole, tensor.name)
    return whole


def _check_finite(tensor: Tensor, name: str) -> None:
    extremes = tensor.aminmax() if tensor.numel() else ()  # NaN passes through
    if not all(math.isfinite(value) for value in extremes):
        raise HpctrainError(
            f"{name}: has numbers that are not finite in {str(tensor.dtype).removeprefix('torch.')}; "
            "use --dtype float32 or bfloat16, or an earlier checkpoint with --step"
        )
