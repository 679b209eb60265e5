"""Exports a run's checkpoint as a Hugging Face folder. This module checks the request and writes the files without
tensors; a worker process writes the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import write_json, write_text
from hpctrain.base.errors import InputError
from hpctrain.base.package_data import render_template
from hpctrain.base.process import Runner
from hpctrain.base.system.disk_space import check_disk_space
from hpctrain.corpus.read.objective import special_tokens
from hpctrain.hf.config import CONFIG_NAME, config_of, continued_config, export_architecture
from hpctrain.hf.folder import hf_tokenizer
from hpctrain.hf.output import check_output, made_whole
from hpctrain.hf.tensors import BYTES, assign_to_shards, index_of
from hpctrain.launch.checkpoints import ask_worker, checkpoint_of
from hpctrain.records.model.families import FamilySpec
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import check_trusted

_MODEL_CARD = Path(__file__).with_name("model_card.md.j2")
_SURPLUS_BYTES = 1 << 20
"""Bytes allowed for the files without tensors, except the tokenizer, which is counted separately."""


@dataclass(frozen=True)
class ExportResult:
    """Summary of an exported Hugging Face folder."""

    step: int
    """Step of the checkpoint."""
    architecture: str
    """Name of transformers' class for the model."""
    files: list[str]
    """Names of the files in the folder, sorted."""
    size_bytes: int
    """Bytes of all files together."""
    parameters: int
    """Number of the model's parameters."""


def export(
    folder: Path, output: Path, step: int | None, dtype: str, shard_bytes: int, force: bool, runner: Runner
) -> ExportResult:
    """Export a checkpoint as a Hugging Face folder, and return a summary of the folder.

    The files are written into a temporary folder, which is then renamed to `output`. So `output` never holds a part of
    the model.

    Args:
        folder: the run folder.
        step: step of the checkpoint; None: the newest complete one.
        dtype: number format of the exported weights: float32, bfloat16 or float16.
        shard_bytes: most bytes of a file with tensors; a larger tensor gets a larger file of its own.
        force: whether to replace an existing model folder.

    Raises:
        InputError: there is no such checkpoint, the run's model is imported from a person's code, or `output` holds
            files that may not be replaced.
        CheckpointError: the checkpoint's files differ from what was written.
        StorageError: there is no space, or the folder cannot be written.
        HpctrainError: the worker failed.
    """
    check_trusted(folder)
    run = run_of(folder)
    spec = run.spec()
    if isinstance(spec, ImportedSpec):
        raise InputError(f"{folder}: model.import: transformers has no class for a model of your own")
    output = output.resolve()
    check_output(output, force)
    checkpoint = checkpoint_of(folder, step, spec.sha256())
    files = assign_to_shards(export_architecture(run.model.hf_model, spec).tensors(spec), BYTES[dtype], shard_bytes)
    done = int(checkpoint.name.rpartition("-")[2])
    with made_whole(output) as made:
        size = sum(tensor.count for group in files.values() for tensor in group) * BYTES[dtype]
        check_disk_space(made, size + _SURPLUS_BYTES, "the exported model", len(files))
        config = _write_beside(made, run, spec, dtype, done)
        asked: dict[str, Any] = {"output": str(made), "dtype": dtype, "shard_bytes": shard_bytes}
        ask_worker("export", folder, checkpoint, runner, "exports", **asked)
        if len(files) > 1:
            write_json(made / "model.safetensors.index.json", index_of(files, BYTES[dtype]))
        names = sorted(path.name for path in made.iterdir())
        size = sum((made / name).stat().st_size for name in names)
    return ExportResult(done, config["architectures"][0], names, size, spec.parameters())


def _write_beside(made: Path, run: Run, spec: FamilySpec, dtype: str, step: int) -> dict[str, Any]:
    """Write config.json, the tokenizer's files, generation_config.json (not for the family encoder) and the model card
    into the folder `made`; return the content of config.json.

    Args:
        step: step of the checkpoint, for the model card.
    """
    home = run.data.train_folders[0]
    special = special_tokens([home], run.effective_objective(), run.data.seq_len)
    if run.model.hf_model is not None:
        config = continued_config(run.model.hf_model.config, spec, run.data.seq_len)
    else:
        config = config_of(spec, run.data.seq_len, special)
    config["torch_dtype"] = dtype
    if spec.family != "encoder":
        # The model was trained to end with the end token of its data, whatever the original Hugging Face folder names.
        config["eos_token_id"] = special.end_of_text
    write_json(made / CONFIG_NAME, config)
    longest = config.get("n_positions") or config.get("max_position_embeddings") or run.data.seq_len
    text, tokenizer_config = hf_tokenizer(Path(home), special, longest)
    write_text(made / "tokenizer.json", text)
    write_json(made / "tokenizer_config.json", tokenizer_config)
    if spec.family != "encoder":
        keys = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        generation = {key: config[key] for key in keys if config.get(key) is not None}
        write_json(made / "generation_config.json", generation)
    values = {"run": run, "step": step, "architecture": config["architectures"][0], "parameters": spec.parameters()}
    write_text(made / "README.md", render_template(_MODEL_CARD, **values))
    return config
