"""The sizes of a model that a run imports from the user's code. Another process measures them, because this one has no
torch and does not run the user's code."""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import CommandTimeoutError, InputError
from hpctrain.base.process import Runner
from hpctrain.corpus.read.objective import SpecialTokens, special_tokens
from hpctrain.hf.start_from_folder import with_hf_folder
from hpctrain.launch.worker_request import worker_reply
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.run.objective import NEXT_TOKEN, AnyObjective, lengths, resolved_objective
from hpctrain.records.run.run import Run

LIMIT_S = 600.0


def with_model_sizes(run: Run, runner: Runner, code: Path | None = None) -> tuple[Run, Spec]:
    """Return the run with its model written out, and its spec.

    Added are the vocabulary of its data, the settings of a Hugging Face folder, or the sizes of an imported model
    (model.import).

    Args:
        code: folder that is searched first for the user's packages; None: `code` of the run file.

    Raises:
        InputError: the data is not prepared, or something is wrong with the imported model.
        FileError: a Hugging Face folder cannot be used.
    """
    run = with_hf_folder(run)
    model = run.model
    if model.import_ is None:
        spec = run.spec()
        if reason := spec.sequence_length_error(run.data.seq_len):
            raise InputError(f"data.seq_len is {run.data.seq_len}, and {reason}")
        if not isinstance(spec, ImportedSpec) and spec.vocab is None:
            spec = spec.model_copy(
                update={"vocab": special_tokens_for(run, resolved_objective(run.objective, spec)).vocabulary}
            )
        if isinstance(spec, EncoderDecoderSpec) and spec.decoder_seq is None:
            outputs = lengths(resolved_objective(run.objective, spec), run.data.seq_len).outputs
            spec = spec.model_copy(update={"decoder_seq": outputs})
        return run.with_spec(spec), spec
    # An imported model has one stack; its default objective is next-token prediction.
    tokens = special_tokens_for(run, run.objective or NEXT_TOKEN).vocabulary
    if model.measured is not None and model.is_measured(tokens, run.data.seq_len):
        return run, model.measured
    measured = _ask(run, tokens, code or (Path(run.code) if run.code else None), runner)
    return run.with_spec(measured), measured


def special_tokens_for(run: Run, objective: AnyObjective) -> SpecialTokens:
    """Return the special tokens of the data, and those that the objective needs besides.

    Raises:
        InputError, FileError: the data is not prepared, or its tokenizer cannot be read.
    """
    return special_tokens(run.data.train_folders, objective, run.data.seq_len)


def _ask(run: Run, tokens: int, code: Path | None, runner: Runner) -> ImportedSpec:
    if code is not None and not code.is_dir():
        raise InputError(f"code: {code}: no such folder; name the folder that holds your packages")
    model = run.model
    question = {
        "factory": model.import_,
        "args": model.args or {},
        "front": model.front,
        "blocks": model.blocks,
        "back": model.back,
        "tensor_parallel": model.tensor_parallel or {},
        "tokens": tokens,
        "seq_len": run.data.seq_len,
        "seed": run.seed,
    }
    options = ["--code", str(code)] if code is not None else []
    try:
        _, answer = worker_reply("describe", question, runner, f"makes {model.import_}", options, LIMIT_S)
    except CommandTimeoutError:
        raise InputError(f"model.import: {model.import_} gave no model within {LIMIT_S:g} s") from None
    if "error" in answer:
        raise InputError(answer["error"])
    return ImportedSpec.model_validate(answer["spec"])
