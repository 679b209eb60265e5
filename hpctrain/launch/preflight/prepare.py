"""Reads and checks all inputs of a run before anything starts, completes the sizes of its model, and creates its run
folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandTimeoutError, FieldError, FileError, InputError
from hpctrain.base.process import Runner
from hpctrain.corpus.read.mixture import open_training
from hpctrain.corpus.read.objective import SpecialTokens, special_tokens
from hpctrain.corpus.read.tokens import check_tokenizer, open_named, open_validation
from hpctrain.hf.folder import with_hf_folder
from hpctrain.launch.container_command import check_container
from hpctrain.launch.local import check_gpus, local_nodes
from hpctrain.launch.preflight.checks import check_devices, check_plan, check_topology
from hpctrain.launch.preflight.provenance import SubmittedSoftware, write_provenance
from hpctrain.launch.worker_request import worker_reply
from hpctrain.records.model.block_stack import TransformerSpec
from hpctrain.records.model.encoder_decoder_spec import EncoderDecoderSpec
from hpctrain.records.model.hf_model import HfModel
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.objective import NEXT_TOKEN, AnyObjective, lengths, resolved_objective
from hpctrain.records.run.run import Run, read_run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.code_copy import copy_code
from hpctrain.runs.folder import RunFolder, create_run_folder, remove_on_error
from hpctrain.runs.secrets import check_secrets


@dataclass(frozen=True)
class PreparedRun:
    """A run whose inputs passed all checks."""

    run: Run
    """The run, with the vocabulary size of its data."""
    spec: Spec
    """The run's model."""
    nodes: list[str]
    """Names of the nodes; [] if they are not known yet, as before a job is queued."""
    topology: Topology | None
    """The topology that the user gave; None: the run probes its nodes."""
    plan: Plan | None
    """The plan that the user gave; None: the run makes one."""


def resolve_run(run: Run, runner: Runner, code: Path | None = None) -> tuple[Run, Spec]:
    """Return the run with all sizes of its model, and the model's spec, after checking the run's data and secrets.

    Args:
        code: folder with the user's packages, for an imported model; None: `code` of the run file.

    Raises:
        InputError: the data folder is missing, not prepared or too small; the model's vocabulary is smaller than the
            data's; data.tokenizer is not that of the data; an imported model cannot be used; the run file holds a
            secret, or names one that is missing.
        FileError: a token shard was cut short, or the Hugging Face folder `model.hf` cannot be used.
        HpctrainError: the process that builds the model failed.
    """
    check_secrets(run, os.environ)
    run, spec = with_model_sizes(run, runner, code)
    objective, data = run.effective_objective(), run.data
    needed = special_tokens_for(run, objective)
    if spec.vocabulary < needed.vocabulary:
        added = f", the objective {objective.mode} its own" if needed.vocabulary > needed.data_vocabulary else ""
        field, remedy = "model.dims.vocab", f"leave it out, or make it {needed.vocabulary}"
        if run.model.hf is not None:
            field, remedy = "model.hf: config.json: vocab_size", "prepare the data with the model's own tokenizer"
        raise InputError(
            f"{field}: found {spec.vocabulary}; the data has tokens up to {needed.data_vocabulary}{added}: {remedy}"
        )
    if data.tokenizer is not None:
        check_tokenizer(data.train_folders, data.tokenizer)
    length = lengths(objective, data.seq_len).raw
    open_training(data.train_folders, data.weights, length)
    named = data.valid if isinstance(data.valid, dict) else {}
    open_validation(data.train_folders, [] if named else data.valid_folders, length)
    open_named(data.train_folders, named, length)
    return run, spec


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a new run: its files, overrides and defaults."""

    run_file: Path
    overrides: tuple[str, ...] = ()
    """Settings that replace those of the run file, written key=value."""
    topology_file: Path | None = None
    """The user's topology; None: the run probes its nodes."""
    plan_file: Path | None = None
    """The user's plan; None: the run makes one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that neither the run file nor an override gives."""

    def run(self) -> Run:
        """Return the run of the run file, with overrides and defaults.

        Raises:
            InputError: an override is no 'key.path=value'.
            FileError: the run file, or the value of an override, is wrong.
        """
        return read_run(self.run_file, self.overrides, self.defaults)


def prepare(given: RunInputs, runner: Runner, count: int | None = None, queued: bool = False) -> PreparedRun:
    """Return the run with all its inputs, after reading and checking them; nothing is written. A run with a given plan
    keeps this plan (`adapt.mode: off`), unless its run file states `adapt.mode`.

    Args:
        count: number of virtual nodes; None: cluster.nodes of the run file.
        queued: the run goes into a queue, so its nodes are unknown; the job checks what depends on them.

    Raises:
        FileError, InputError: a file is wrong or missing.
        RefusedError: the topology or the plan is for other nodes, or the plan is provisional.
        HpctrainError: the process that builds the model failed.
    """
    run, spec = resolve_run(given.run(), runner)
    check_container(run.container, not queued, shutil.which)
    topology = Topology.read(given.topology_file) if given.topology_file else None
    plan = Plan.read(given.plan_file) if given.plan_file else None
    nodes = [] if queued else local_nodes(count or fewest_nodes(run))
    if not queued:
        check_gpus(len(nodes), run.cluster.device, os.environ)
    if topology is not None and not queued:
        check_topology(topology, nodes, str(given.topology_file))
    if plan is not None:
        check_plan(plan, run, spec, plan.nodes if queued else nodes, str(given.plan_file))
        if topology is not None:
            check_devices(plan, topology, str(given.plan_file))
        if run.adapt.mode is None:  # a plan that somebody gives is obeyed to the letter
            run = run.model_copy(update={"adapt": run.adapt.model_copy(update={"mode": "off"})})
    return PreparedRun(run, spec, nodes, topology, plan)


def fewest_nodes(run: Run) -> int:
    """Return the fewest nodes that a run needs: 3 if cluster.nodes is '3-4'."""
    return run.cluster.node_range[0]


def runs_folder() -> Path:
    """Return the folder in which run folders are made: $HPCTRAIN_RUNS, else ./runs."""
    return Path(os.environ.get("HPCTRAIN_RUNS") or "runs")


def make_folder(
    prepared: PreparedRun, base: Path, runner: Runner, clock: Clock, software: SubmittedSoftware | None = None
) -> RunFolder:
    """Create a run folder in the folder `base`, with the resolved run file, topology and plan if given, a copy of the
    user's code, and the run's provenance.

    Args:
        software: the software of this process, if it is known already; None: the function finds it out.

    Raises:
        InputError: `code` of the run file is no folder, or too large to be code; or the folder's path holds a control
            character.
        StorageError: the run folder cannot be written; nothing of it is left.
    """
    folder = create_run_folder(base, prepared.run, prepared.topology, prepared.plan, clock.wall())
    with remove_on_error(folder):
        if prepared.run.code is not None:
            copy_code(Path(prepared.run.code), folder.path, runner)
        write_provenance(prepared.run, folder.path, runner, clock, os.environ, software)
    return folder


LIMIT_S = 600.0
"""Seconds that the code of an imported model, or transformers, gets to build the model."""


def with_model_sizes(run: Run, runner: Runner, code: Path | None = None) -> tuple[Run, Spec]:
    """Return the run with all sizes of its model, and the model's spec.

    The function adds what the run file leaves out: the vocabulary size of the data, the settings of a Hugging Face
    folder, or the sizes of an imported model (model.import).

    Args:
        code: folder that is searched first for the user's packages; None: `code` of the run file.

    Raises:
        InputError: the data is not prepared, `data.seq_len` or the data's vocabulary does not fit the model, or
            something is wrong with the imported model.
        FileError: a Hugging Face folder cannot be used.
        HpctrainError: the process that builds the model failed.
    """
    run = with_hf_folder(run, lambda error: built_by_transformers(run, error, runner))
    model = run.model
    if model.import_ is None:
        spec = run.spec()
        if reason := spec.sequence_length_error(run.data.seq_len):
            raise InputError(f"data.seq_len is {run.data.seq_len}, and {reason}")
        if isinstance(spec, TransformerSpec) and spec.vocab is None:
            spec = spec.model_copy(
                update={"vocab": special_tokens_for(run, resolved_objective(run.objective, spec)).vocabulary}
            )
            if reason := spec.vocabulary_error(spec.vocabulary):
                raise InputError(f"model.dims: {reason} (counted in the data)")
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
    """Return the special tokens of the run's data, and those that the objective needs besides.

    Raises:
        InputError, FileError: the data is not prepared, or its tokenizer cannot be read.
    """
    return special_tokens(run.data.train_folders, objective, run.data.seq_len)


def _ask(run: Run, tokens: int, code: Path | None, runner: Runner) -> ImportedSpec:
    if code is not None and not code.is_dir():
        raise InputError(f"code: {code}: no such folder; name the folder that holds your packages")
    model = run.model
    question = {
        "factory": model.import_, "args": model.args or {}, "front": model.front, "blocks": model.blocks,
        "back": model.back, "tensor_parallel": model.tensor_parallel or {}, "tokens": tokens,
        "seq_len": run.data.seq_len, "seed": run.seed,
    }  # fmt: skip
    options = ["--code", str(code)] if code is not None else []
    try:
        _, answer = worker_reply("describe", question, runner, f"makes {model.import_}", options, LIMIT_S)
    except CommandTimeoutError:
        raise InputError(f"model.import: {model.import_} gave no model within {LIMIT_S:g} s") from None
    if "error" in answer:
        raise InputError(answer["error"])
    return ImportedSpec.model_validate(answer["spec"])


def built_by_transformers(run: Run, refused: FileError, runner: Runner) -> HfModel:
    """Return what the folder `model.hf` holds, if transformers can build its model and hpctrain can cut it.

    Args:
        refused: why the model is none of hpctrain's own families.

    Raises:
        FileError: transformers cannot build the model, or hpctrain cannot cut it.
        HpctrainError: the process that builds the model failed.
    """
    unknown = refused.mistakes[0].field == "architectures"
    because = "hpctrain has no such family" if unknown else "; ".join(f"{m.field}: {m.text}" for m in refused.mistakes)
    question = {"folder": run.model.hf, "because": because, "seq_len": run.data.seq_len, "seed": run.seed}
    try:
        _, answer = worker_reply("describe", question, runner, f"builds the model of {run.model.hf}", limit_s=LIMIT_S)
    except CommandTimeoutError:
        answer = {"error": f"{run.model.hf}: transformers gave no model within {LIMIT_S:g} s"}
    if "error" not in answer:
        return HfModel.model_validate(answer["hf_model"])
    *others, last = refused.mistakes
    # The names of all architectures that hpctrain has would hide what transformers says.
    refusal = last.text.partition("; allowed: ")[0] if unknown else last.text
    reason = str(answer["error"]).removeprefix(f"{refused.path}: ")
    text = f"{refusal}; transformers cannot build it either: {reason}"
    raise FileError(refused.path, [*others, FieldError(last.field, text)])
