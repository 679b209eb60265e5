"""`python -m hpctrain.worker export`: writes a checkpoint of any plan as safetensors files that transformers reads.

The request is JSON on the command line, the reply is JSON on stdout: {"files": …} or {"error": …}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.checkpoint.save_and_load import load
from hpctrain.hf.config import export_architecture
from hpctrain.hf.tensors import BYTES, HfTensor, assign_to_shards
from hpctrain.model.hf_weights import to_hf_tensor
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.run.run import run_of
from hpctrain.worker.verbs.json_reply import json_reply


@dataclass(frozen=True)
class ExportRequest:
    """A request to export a checkpoint: which one, to which folder, and in which dtype."""

    folder: str
    """The run folder."""
    checkpoint: str
    """Path of a verified checkpoint folder."""
    output: str
    """Existing folder to which the safetensors files are written."""
    dtype: str
    """Dtype of the files: float32, bfloat16 or float16."""
    shard_bytes: int
    """Size limit of one file in bytes. A file is larger only if a single tensor is."""


def main(argv: list[str]) -> int:
    """Export the checkpoint that the request names. Return 0, or the exit code of an error that the reply describes."""
    question = ExportRequest(**json.loads(argv[0]))
    return json_reply(lambda: {"files": export(question)})


def export(question: ExportRequest) -> list[str]:
    """Write the checkpoint's weights as safetensors files and return the names of the files. At any time the memory
    holds the tensors of one file only, in the dtype of the files.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        StorageError: a file cannot be written.
        HpctrainError: a weight is not finite in the dtype.
    """
    run = run_of(Path(question.folder))
    spec = run.spec()
    assert not isinstance(spec, ImportedSpec), "refused before a process was started"
    stored = export_architecture(run.model.hf_model, spec).tensors(spec)
    files = assign_to_shards(stored, BYTES[question.dtype], question.shard_bytes)
    dtype: torch.dtype = getattr(torch, question.dtype)
    for name, tensors in files.items():
        loaded = {tensor.name: _loaded(tensor, Path(question.checkpoint), dtype) for tensor in tensors}
        _write(loaded, Path(question.output) / name)
    return list(files)


def _loaded(tensor: HfTensor, checkpoint: Path, dtype: torch.dtype) -> Tensor:
    shapes = zip(tensor.parameters, tensor.parameter_shapes, strict=True)
    parameters = {f"model.{name}": torch.empty(shape) for name, shape in shapes}
    load(parameters, checkpoint, None)
    whole = to_hf_tensor(tensor, list(parameters.values())).to(dtype)
    if not torch.isfinite(whole).all():
        raise HpctrainError(
            f"{tensor.name}: has numbers that are not finite in {str(dtype).removeprefix('torch.')}; "
            "use --dtype float32 or bfloat16, or an earlier checkpoint with --step"
        )
    return whole


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise StorageError(f"{path}: cannot write: {error}; free some space or choose another folder") from None
    with storage_errors(path):
        sync(path)
