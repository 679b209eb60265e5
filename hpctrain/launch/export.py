"""Exports a run's model as a folder of safetensors files or as a DCP folder: for transformers, or for the code that a
model of the user's own comes from. This module checks the request and writes the files without tensors; worker
processes write the tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import write_json, write_text
from hpctrain.base.package_data import render_template
from hpctrain.base.process import Runner
from hpctrain.base.system.disk_space import check_disk_space
from hpctrain.checkpoint.published import step_of
from hpctrain.corpus.prepare.tokenizer import TOKENIZER_NAME
from hpctrain.corpus.read.objective import SpecialTokens, special_tokens
from hpctrain.hf.config import CONFIG_NAME, config_of, continued_config
from hpctrain.hf.output import ExportFormat, check_output, made_whole
from hpctrain.hf.source_settings import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    SourceSettings,
    read_source_settings,
    with_end,
)
from hpctrain.hf.tensors import BYTES
from hpctrain.hf.tokenizer import hf_tokenizer
from hpctrain.launch.checkpoints import ask_worker, read_checkpoint
from hpctrain.records.model.families import BiasedSpec
from hpctrain.records.model.hf_model import HfSpec
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.model.transformers_spec import TransformersSpec
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import check_trusted

_MODEL_CARD = Path(__file__).with_name("model_card.md.j2")
_OWN_MODEL_CARD = Path(__file__).with_name("own_model_card.md.j2")
_SURPLUS_BYTES = 1 << 20
"""Bytes that the check of disk space allows for the headers of the tensors' files and for their index. All other files
are written before the check."""


@dataclass(frozen=True)
class ExportResult:
    """Summary of an exported folder."""

    step: int
    """Step of the checkpoint; 0: the model before training."""
    architecture: str
    """Name of transformers' class for the model; of an imported model the user's factory, 'package.module:factory'."""
    files: list[str]
    """Names of the files in the folder, sorted."""
    size_bytes: int
    """Bytes of all files together."""
    parameters: int
    """Number of the model's parameters."""
    warnings: list[str] = field(default_factory=list)
    """What the folder lacks, such as the settings of a Hugging Face folder that is gone."""


def export(
    folder: Path, output: Path, step: int | None, dtype: str, shard_bytes: int, force: bool, runner: Runner,
    processes: int = 1, file_format: ExportFormat = "hf",
) -> ExportResult:  # fmt: skip
    """Export a run's model as a folder of safetensors files or as a DCP folder, and return a summary of the folder.

    The files are written into a temporary folder, which is then renamed to `output`. So `output` never holds a part of
    the model.

    Args:
        folder: the run folder.
        step: step of the checkpoint; 0: the model before training; None: the newest complete checkpoint.
        dtype: number format of the exported weights: float32, bfloat16 or float16.
        shard_bytes: most bytes of a file with tensors; a larger tensor gets a larger file of its own.
        force: whether to replace an existing model folder.
        processes: number of processes that share the tensors.
        file_format: format of the tensors; their names and shapes are the same in both.

    Raises:
        InputError: there is no such checkpoint, `output` holds files that may not be replaced, or the run folder is
            untrusted.
        CheckpointError: the checkpoint's files differ from what was written.
        StorageError: there is no space, or the folder cannot be written.
        HpctrainError: the worker failed.
    """
    check_trusted(folder)
    run = run_of(folder)
    spec = run.spec()
    output = output.resolve()
    check_output(output, force)
    source, warnings = _source_settings(run)

    def write(checkpoint: Path | None) -> ExportResult:
        done = step_of(checkpoint)
        with made_whole(output, force) as made:
            size = spec.parameters() * BYTES[dtype]
            architecture = _write_beside(made, folder, run, dtype, done, file_format, source)
            check_disk_space(made, size + _SURPLUS_BYTES, "the exported tensors", -(-size // shard_bytes))
            ask_worker(
                "export", folder, checkpoint, runner, "exports",
                output=str(made), dtype=dtype, shard_bytes=shard_bytes, processes=processes, file_format=file_format,
            )  # fmt: skip
            names = sorted(path.name for path in made.iterdir())
            size = sum((made / name).stat().st_size for name in names)
        return ExportResult(done, architecture, names, size, spec.parameters(), warnings)

    return read_checkpoint(folder, step, spec.sha256(), write)


def _source_settings(run: Run) -> tuple[SourceSettings, list[str]]:
    """Return the settings of tokenizer and generation of the Hugging Face folder from which the run started, and a
    warning if the folder is gone. Without a folder, the settings are empty."""
    folder = run.model.hf
    if folder is None:
        return SourceSettings(), []
    text = f"model.hf: {folder}: no such folder; the export lacks its chat template and its settings of generation"
    return read_source_settings(Path(folder)), [text] * (not os.path.lexists(folder))


def _write_beside(
    made: Path, folder: Path, run: Run, dtype: str, step: int, file_format: ExportFormat, source: SourceSettings
) -> str:  # fmt: skip
    """Write the files of an export that are no tensors, and return the name of the model's class or factory.

    A folder for transformers gets config.json, the tokenizer's files, generation_config.json (not for the family
    encoder) and a model card. A model of the user's own gets the tokenizer and a description of how its code loads the
    tensors.

    Args:
        made: folder of the export.
        folder: the run folder.
        step: step of the checkpoint, for the model card.
        file_format: format of the tensors, for the model card.
        source: settings of the Hugging Face folder from which the run started.
    """
    spec = run.spec()
    values: dict[str, Any] = {"run": run, "folder": folder.name, "step": step, "parameters": spec.parameters()}
    values["file_format"] = file_format
    special = special_tokens(run.data.train_folders[:1], run.effective_objective(), run.data.seq_len)
    if isinstance(spec, ImportedSpec):
        text, _ = hf_tokenizer(Path(run.data.train_folders[0]), special, run.data.seq_len)
        write_text(made / TOKENIZER_NAME, text)
        known = {"vocabulary": spec.tokens, "seq_len": spec.seq_len, **spec.args}
        arguments = ", ".join(f"{key}={value!r}" for key, value in known.items())
        write_text(made / "README.md", render_template(_OWN_MODEL_CARD, **values, model=spec, arguments=arguments))
        return spec.factory
    config = _write_config(made, run, spec, special, dtype, source)
    architecture = str(config["architectures"][0])
    write_text(made / "README.md", render_template(_MODEL_CARD, **values, architecture=architecture))
    return architecture


def _write_config(
    made: Path, run: Run, spec: HfSpec, special: SpecialTokens, dtype: str, source: SourceSettings
) -> dict[str, Any]:  # fmt: skip
    """Write the files that transformers reads, besides the tensors, and return the content of config.json."""
    if run.model.hf_model is not None:
        config = continued_config(run.model.hf_model.config, spec, run.data.seq_len)
    else:
        assert not isinstance(spec, TransformersSpec), "such a model is that of a folder"
        config = config_of(spec, run.data.seq_len, special)
    config["torch_dtype"] = dtype
    if spec.family != "encoder":
        # The model was trained to end with the end token of its data, whatever the original Hugging Face folder names.
        end = special.end_of_text
        config["eos_token_id"] = with_end(config.get("eos_token_id"), end, end)
    write_json(made / CONFIG_NAME, config)
    longest = config.get("max_position_embeddings") or run.data.seq_len
    if isinstance(spec, BiasedSpec) and spec.position_rows:
        longest = spec.positions
    text, tokenizer_config = hf_tokenizer(Path(run.data.train_folders[0]), special, longest, source, config)
    write_text(made / TOKENIZER_NAME, text)
    write_json(made / TOKENIZER_CONFIG, tokenizer_config)
    if source.chat_template is not None:
        write_text(made / CHAT_TEMPLATE, source.chat_template)
    if spec.family != "encoder":
        write_json(made / GENERATION_CONFIG, source.generation_config(config, special.end_of_text))
    return config
