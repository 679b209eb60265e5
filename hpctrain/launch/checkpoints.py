"""Evaluates a run's checkpoint on given data, or exports it as a Hugging Face folder. This module checks the request
and writes the files without tensors. A worker process computes the loss, or writes the tensors."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.atomic import storage_errors, swap, sync, write_json, write_text
from hpctrain.base.errors import CheckpointError, HpctrainError, InputError
from hpctrain.base.package_data import render_template
from hpctrain.base.process import Runner
from hpctrain.base.system.disk_space import check_disk_space
from hpctrain.checkpoint.published import folder_name, listed, newest, verify
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.read.objective import special_tokens
from hpctrain.corpus.read.tokens import Split, describe_tokenizer, read_index, same_tokens, tokenizer_option
from hpctrain.hf.config import CONFIG_NAME, config_of, continued_config
from hpctrain.hf.folder import hf_tokenizer
from hpctrain.hf.tensors import BYTES, assign_to_shards, index_of, tensors_of
from hpctrain.launch.worker_request import worker_reply
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex
from hpctrain.records.history.run_log import perplexity
from hpctrain.records.model.families import FamilySpec
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.run.run import Run, run_of
from hpctrain.runs.folder import check_trusted


@dataclass(frozen=True)
class CheckpointEvaluation:
    """The loss of a checkpoint on one corpus."""

    path: str
    """The corpus folder or text, as named on the command line."""
    loss: float
    """Mean cross-entropy, nats per target."""
    perplexity: float | None
    """exp(loss); None if it is too large for a float."""
    samples: int
    """Number of sequences that were evaluated."""
    tokens: int
    """Number of tokens in the evaluated sequences."""
    targets: int
    """Number of targets that `loss` is the mean over."""


def evaluate(
    folder: Path, data: Sequence[str], step: int | None, split: Split, samples: int | None, runner: Runner
) -> tuple[int, list[CheckpointEvaluation]]:
    """Return the step of the evaluated checkpoint, and one result for each item of `data`, in order.

    Args:
        folder: the run folder.
        data: paths of corpus folders or of text, from which the run's tokenizer makes temporary corpora.
        step: step of the checkpoint; None: the newest complete one.
        split: the part of a corpus folder to evaluate; a text is evaluated as a whole.
        samples: most sequences to evaluate of each item of `data`; None: all.

    Raises:
        InputError: there is no such checkpoint, others can write to the run folder, or the data is missing or has
            another tokenizer than the run.
        CheckpointError: the checkpoint's files differ from what was written.
        HpctrainError: the worker failed.
    """
    check_trusted(folder)
    run = run_of(folder)
    checkpoint = checkpoint_of(folder, step, run.spec().sha256())
    with _corpora(run, data) as corpora:
        paths = [str(path.resolve()) for path in corpora]
        answer = _ask_worker("eval", folder, checkpoint, runner, "evaluates", data=paths, split=split, samples=samples)
    judged = [
        CheckpointEvaluation(
            name, item["loss"], perplexity(item["loss"]),
            item["samples"], item["samples"] * run.data.seq_len, item["targets"],
        )
        for name, item in zip(data, answer["sets"], strict=True)
    ]  # fmt: skip
    return int(checkpoint.name.rpartition("-")[2]), judged


def _ask_worker(
    verb: str, folder: Path, checkpoint: Path, runner: Runner, does: str, **question: object
) -> dict[str, Any]:
    """Return the answer of a new worker process to a request about a run's checkpoint.

    Args:
        verb: command of `hpctrain.worker`: eval or export.
        folder: the run folder.
        checkpoint: folder of the checkpoint.
        does: what the process does, as a verb for error messages ("exports").
        question: values of the request, besides `folder` and `checkpoint`.

    Raises:
        InputError: the worker reported wrong input.
        HpctrainError: the worker reported another error, or ended without an answer.
    """
    places = {"folder": str(folder.resolve()), "checkpoint": str(checkpoint.resolve())}
    code, answer = worker_reply(verb, places | question, runner, does)
    if "error" in answer:
        raise (InputError if code == InputError.exit_code else HpctrainError)(answer["error"])
    return answer


def checkpoint_of(folder: Path, step: int | None, model_sha256: str) -> Path:
    """Return the folder of one checkpoint of the run in `folder`, after verifying the checkpoint's files.

    Args:
        step: step of the checkpoint; None: the newest checkpoint that verifies and is of the run's model.
        model_sha256: hash of the run's model; a checkpoint of a given step is not compared with it.

    Raises:
        InputError: the run has no such checkpoint.
        CheckpointError: the checkpoint's files differ from what was written.
    """
    checkpoints = folder / "checkpoints"
    if step is None:
        checkpoint, skipped = newest(checkpoints, model_sha256)
        if checkpoint is None:
            why = f" ({skipped[0].path.name}: {skipped[0].reason})" if skipped else ""
            raise InputError(f"{folder}: has no checkpoint yet{why}; it gets one every checkpoint.every steps")
        return checkpoint.path
    path = checkpoints / folder_name(step)
    there = listed(checkpoints)
    if path not in there:
        steps = ", ".join(str(int(item.name.rpartition("-")[2])) for item in there) or "none"
        raise InputError(f"--step {step}: {folder} has no checkpoint of that step; it has: {steps}")
    try:
        verify(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; leave --step out for the newest that is whole") from None
    return path


@contextlib.contextmanager
def _corpora(run: Run, data: Sequence[str]) -> Iterator[list[Path]]:
    """Yield a list with a corpus folder for each path in `data`, in order: the path itself, or a corpus folder made of
    the text at the path. Folders made from text are removed when the context ends."""
    home = run.data.train_folders[0]
    index = read_index(home, "data.train[0]")
    with tempfile.TemporaryDirectory(prefix="hpctrain-eval-") as made:
        yield [_corpus(Path(path), Path(made) / str(number), home, index) for number, path in enumerate(data)]


def _corpus(path: Path, made: Path, home: str, index: CorpusIndex) -> Path:
    tokenizer = tokenizer_option(home, index).removeprefix("--tokenizer ")
    if not (path / INDEX_NAME).exists():
        if not path.exists():
            raise InputError(f"DATA: {path}: no such file or folder; name corpus folders, or text")
        prepare([path], made, PrepareOptions(tokenizer=tokenizer, valid_fraction=0.0))
        return made
    corpus = read_index(path, "DATA")
    if not same_tokens(corpus, index):
        raise InputError(
            f"DATA: {path}: its tokenizer ({describe_tokenizer(corpus)}) is not that of the run "
            f"({describe_tokenizer(index)}); name the text itself, or prepare it again with --tokenizer {tokenizer}"
        )
    return path


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
    _check_output(output, force)
    checkpoint = checkpoint_of(folder, step, spec.sha256())
    files = assign_to_shards(tensors_of(spec), BYTES[dtype], shard_bytes)
    done = int(checkpoint.name.rpartition("-")[2])
    with _made_whole(output) as made:
        size = sum(tensor.count for group in files.values() for tensor in group) * BYTES[dtype]
        check_disk_space(made, size + _SURPLUS_BYTES, "the exported model", len(files))
        config = _write_beside(made, run, spec, dtype, done)
        asked: dict[str, Any] = {"output": str(made), "dtype": dtype, "shard_bytes": shard_bytes}
        _ask_worker("export", folder, checkpoint, runner, "exports", **asked)
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


def _check_output(output: Path, force: bool) -> None:
    """Check that writing to `output` replaces nothing, or with `force` only a model folder.

    Raises:
        InputError: `output` is a file, holds any files without `force`, or with `force` holds other things than a
            model.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"-o {output}: found a file; name a folder that is not there yet")
    try:
        held = sorted(path.name for path in output.iterdir())
    except OSError as error:
        raise InputError(f"-o {output}: cannot look into it: {error.strerror}") from None
    if not held:
        return
    if not force:
        raise InputError(f"-o {output}: holds {held[0]}; name a new folder, or replace the model in it with --force")
    if CONFIG_NAME not in held or any((output / name).is_dir() for name in held):
        raise InputError(
            f"-o {output}: --force replaces a folder with a model ({CONFIG_NAME} and files beside it), and this holds "
            f"other things; name a new folder"
        )


@contextlib.contextmanager
def _made_whole(output: Path) -> Iterator[Path]:
    """Yield a new temporary folder beside `output`. The temporary folder replaces `output` when the context ends, and
    is removed if the context ends with an error."""
    made = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    with storage_errors(made):
        made.mkdir(parents=True)
    try:
        yield made
        with storage_errors(output):
            sync(made)
            swap(made, output)
            sync(output.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
