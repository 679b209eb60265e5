"""run.yaml: the settings of a run. The string below a field documents its key, also in the JSON schema that `hpctrain
schema run` prints for editors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.records.format.document import BATCH_MAX, DEVICES_MAX, STEPS_MAX, Document, Part
from hpctrain.records.format.file_name import AnyPath, OptionalPath, PathFromFile, resolved_path, with_absolute_paths
from hpctrain.records.format.validation_errors import dotted, validation_errors
from hpctrain.records.format.yaml_file import (
    Override,
    YamlFile,
    apply_overrides,
    missing_values,
    option_for,
    override_paths,
    read_yaml,
    with_defaults,
)
from hpctrain.records.model.families import PRESETS
from hpctrain.records.model.imported_spec import ImportedSpec, Spec
from hpctrain.records.plan.compression import Compression, NoCompression
from hpctrain.records.plan.plan import Recompute, ZeroLevel
from hpctrain.records.run.adapt import Adapt, AdaptMode
from hpctrain.records.run.cluster import Cluster
from hpctrain.records.run.data import Data
from hpctrain.records.run.energy import Energy
from hpctrain.records.run.model_choice import Model
from hpctrain.records.run.objective import AnyObjective, Objective, resolved_objective
from hpctrain.records.run.optimizer import Optimizer
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.tracking import Tracking

RUN_FILE = "run.yaml"
"""Name of the run file in a run folder."""
COMPILE_S = 1800.0
"""Seconds that a step with torch.compile may take: the first step compiles the blocks, slowly for a large model."""


class Container(Part):
    """The container image in which the run's agents and workers run. The job script runs outside of it."""

    image: AnyPath
    """Path of a .sif file; with runtime pyxis, any image that pyxis accepts."""
    runtime: Literal["auto", "apptainer", "singularity", "pyxis"] = "auto"
    """Container runtime. auto: Apptainer, else SingularityCE. pyxis: Slurm's plugin (srun --container-image)."""
    binds: list[str] = []
    """Further bind mounts, SOURCE[:TARGET[:ro]]. The run folder, the data and hpctrain are always mounted."""
    nv: Literal["auto", "yes", "no"] = "auto"
    """Whether the NVIDIA driver is made visible inside the container. auto: on nodes that have the driver."""
    env: dict[str, str] = {}
    """Environment variables that are set inside the container; $NAME stands for a variable of the job."""


class Batch(Part):
    """The global batch: how many sequences one optimizer step takes."""

    global_: int = Field(alias="global", ge=1, le=BATCH_MAX)
    """Sequences in a step over the whole job, whatever the plan and the number of nodes."""


class AutoParallel(Part):
    """The planner chooses the whole plan."""

    mode: Literal["auto"] = "auto"
    """The planner chooses the degrees, the stages and the micro-batches."""


class FixedParallel(Part):
    """The run file states the degrees of parallelism; the planner chooses the rest of the plan."""

    mode: Literal["fixed"]
    """The keys pp, dp and tp are used as given."""
    pp: int = Field(default=1, ge=1, le=DEVICES_MAX)
    """Pipeline ranks of a replica."""
    dp: int = Field(default=1, ge=1, le=DEVICES_MAX)
    """Data-parallel replicas."""
    tp: int = Field(default=1, ge=1, le=DEVICES_MAX)
    """Devices that share each matrix (tensor parallelism)."""
    micro_batch: int | None = Field(default=None, ge=1, le=BATCH_MAX)
    """Sequences in a micro-batch. Default: the planner's choice."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] | None = None
    """Pipeline schedule. Default: the planner's choice."""
    zero: ZeroLevel = 0
    """What is sharded over replicas: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also weights."""
    shard: Literal["all", "node"] = "all"
    """Replicas over which `zero` shards. all: all replicas. node: the replicas within a node; every node then holds a
    copy of the whole state."""
    sequence_parallel: bool = False
    """Whether norms and the residual stream are split along the sequence over the tp devices."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again to save memory: none, selective (all but matrix products and
    attention), full (whole blocks)."""


Parallel = Annotated[AutoParallel | FixedParallel, Field(discriminator="mode")]


class Checkpoint(Part):
    """When checkpoints are saved, and how many are kept. Checkpoints are sharded, are saved while training continues,
    and get their final name only when complete."""

    every: int = Field(default=50, ge=1, le=STEPS_MAX)
    """Steps between two checkpoints. A checkpoint is always saved after the last step."""
    keep: int = Field(default=2, ge=1, le=STEPS_MAX)
    """Number of checkpoints to keep, the newest ones."""
    wait_for_room_s: float = Field(default=1800.0, ge=0)
    """Seconds that a run waits for space on a full disk to save the checkpoint after its last step; then it fails."""


class Validation(Part):
    """When the loss on validation data is measured, and on how many batches."""

    every: int = Field(default=50, ge=1, le=STEPS_MAX)
    """Steps between two validations. The validation loss is always measured after the last step."""
    batches: int = Field(default=2, ge=0, le=STEPS_MAX)
    """Global batches in a validation; 0: no validation."""


class ProfilerSettings(Part):
    """Which optimizer steps are recorded."""

    step: int | None = Field(default=None, ge=1)
    """Optimizer step that torch's profiler records on every rank, into profile/ in the run folder. The profiled step
    takes several times as long as others. Default: none."""
    spans: list[Annotated[int, Field(ge=1, le=STEPS_MAX)]] = Field(default=[10, 100, 1000], max_length=100)
    """Optimizer steps of which each rank records when its operations began and ended, for `hpctrain trace`. It costs
    next to nothing. Steps that the run does not have are left out."""
    layers: bool = False
    """Whether metrics-ranks.jsonl has the time of each block, of one step in ten or more; not with `compile`."""


EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
NotifyState = Literal["started", "done", "failed", "requeued", "cancelled"]


class Notify(Part):
    """A URL that gets a POST of JSON when the run changes its state. Default: none."""

    url_env: EnvironmentName | None = None
    """Name of the environment variable with the URL. Whoever knows the URL can post to it. So the URL is a secret, and
    run.yaml does not contain it."""
    url_file: PathFromFile | None = None
    """File with the URL, in place of `url_env`; only you may be able to read the file (mode 600)."""
    on: list[NotifyState] = ["done", "failed"]
    """States that cause a POST; allowed: started, done, failed, requeued, cancelled."""

    @model_validator(mode="after")
    def _one_address(self) -> Notify:
        if (self.url_env is None) == (self.url_file is None):
            raise ValueError("give url_env or url_file, one of them")
        return self


RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of a run's name, which is also part of the names of its folder and its job."""


class Run(Document):
    """run.yaml: the settings of a training run."""

    schema_kind: ClassVar[str] = "run"

    name: str = Field(default="run", pattern=RUN_NAME)
    """Name of the run and of its run folder."""
    steps: int = Field(ge=1, le=STEPS_MAX)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of samples."""
    code: OptionalPath = None
    """Folder of your own Python code. A copy of it, made when the run is submitted, comes first on the workers' module
    path."""
    secrets: list[EnvironmentName] = []
    """Names of environment variables with passwords or access tokens that the training needs, such as HF_TOKEN. Their
    values come from the environment in which you submit, or from `secrets_file`, and are written nowhere."""
    secrets_file: OptionalPath = None
    """File with lines NAME=value, on a file system that the nodes share; only you may be able to read it (mode 600)."""
    notify: Notify | None = None
    """A URL that gets a POST of JSON when the run changes its state. Default: none."""
    cluster: Cluster = Cluster()
    """Where the run takes place, and what its job requests from Slurm."""
    container: Container | None = None
    """The container image in which the run takes place. Default: none."""
    model: Model
    """The model that is trained."""
    data: Data
    """The data for training and validation."""
    objective: Objective | None = None
    """The training objective. Default: next_token for a decoder, masked for an encoder, span_corruption for an
    encoder-decoder."""
    batch: Batch
    """The global batch: how many sequences one optimizer step takes."""
    parallel: Parallel = AutoParallel()
    """Whether you or the planner choose the degrees of parallelism."""
    compression: Compression = NoCompression()
    """How gradients are reduced between replicas."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its learning rate."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of matrix products. With bf16 and fp16, weights, sums and optimizer stay in fp32. fp16 scales the loss,
    so that small gradients do not vanish, and skips a step whose gradients overflow."""
    tf32: bool = False
    """Whether NVIDIA GPUs may round the inputs of fp32 matrix products to TF32: 10 bits after the binary point instead
    of 23, and several times faster. Without effect in bf16 and fp16."""
    compile: bool = False
    """Whether blocks are compiled (torch.compile): the first step takes minutes, later steps are faster. A step counts
    as hanging only after half an hour or more, because it may include the compilation."""
    deterministic: bool = False
    """Whether the same run file on the same plan gives bitwise equal weights; some operations become slower."""
    checkpoint: Checkpoint = Checkpoint()
    """When checkpoints are saved, and how many are kept."""
    validation: Validation = Validation()
    """When the validation loss is measured, and on how many batches."""
    recovery: Recovery = Recovery()
    """How the run continues when workers or nodes are lost, and when it ends."""
    adapt: Adapt = Adapt()
    """When the plan of a running job changes because of its measured times."""
    profile: ProfilerSettings = ProfilerSettings()
    """Which optimizer steps are recorded."""
    tracking: Tracking = Tracking()
    """Tools for experiments that get the run's metrics while it goes on."""
    energy: Energy = Energy()
    """How often nodes record their energy and their GPUs' health, and how carbon is estimated."""

    @property
    def adapt_mode(self) -> AdaptMode:
        """Return `adapt.mode`, or its default: off with `deterministic`, because another plan would change the last
        bits of the weights; else online."""
        return self.adapt.mode or ("off" if self.deterministic else "online")

    @property
    def step_timeout_s(self) -> float:
        """Return the seconds without a step after which a worker counts as hanging; with `compile`, a step may include
        the compilation of blocks."""
        return max(self.recovery.progress_timeout_s, COMPILE_S if self.compile else 0.0)

    @model_validator(mode="after")
    def _profiled_step_exists(self) -> Run:
        if self.profile.step is not None and self.profile.step > self.steps:
            raise ValueError(f"profile.step is {self.profile.step}, and the run has {self.steps} steps")
        return self

    @model_validator(mode="after")
    def _model_takes_the_sequences(self) -> Run:
        named = self.model.dims is not None or self.model.preset is not None
        if named and (reason := self.spec().sequence_length_error(self.data.seq_len)):
            raise ValueError(f"data.seq_len is {self.data.seq_len}, and {reason}")
        return self

    def spec(self) -> Spec:
        """Return the model's dimensions as far as run.yaml states them; the vocabulary may still be unknown.

        Raises:
            InputError: run.yaml names a Hugging Face folder or an imported model, and hpctrain has not yet written the
                model's dimensions into run.yaml.
        """
        if self.model.dims is not None:
            return self.model.dims
        if self.model.preset is not None:
            return PRESETS[self.model.preset]
        if self.model.measured is not None:
            return self.model.measured
        if self.model.hf_model is not None:
            return self.model.hf_model.spec
        if self.model.import_ is not None:
            raise InputError("model.import: the model was not measured yet; a run folder's own run.yaml has its sizes")
        raise InputError("model.hf: the folder was not read yet; a run folder's own run.yaml has what was in it")

    @property
    def first_weights(self) -> str:
        """Return the source of the initial weights in words: 'the seed', 'the folder PATH' of a Hugging Face model, or
        the name of the user's factory."""
        if self.model.hf is not None:
            return f"the folder {self.model.hf}"
        return self.model.import_ or "the seed"

    def effective_objective(self) -> AnyObjective:
        """Return the objective that run.yaml states, else the default of the model's family.

        Raises:
            InputError: the model's dimensions are unknown, or a model of its family cannot learn the objective.
        """
        return resolved_objective(self.objective, self.spec())

    def with_spec(self, spec: Spec) -> Run:
        """Return the run with `spec` as the dimensions of its model, vocabulary included."""
        if isinstance(spec, ImportedSpec):
            return self.model_copy(update={"model": self.model.model_copy(update={"measured": spec})})
        if self.model.hf_model is not None:
            hf_model = self.model.hf_model.model_copy(update={"dims": spec})
            return self.model_copy(update={"model": self.model.model_copy(update={"hf_model": hf_model})})
        return self.model_copy(update={"model": Model(dims=spec)})


def read_run(path: Path, overrides: tuple[str, ...] = (), defaults: Mapping[str, Any] = MappingProxyType({})) -> Run:
    """Return the settings in a run file, with overrides applied and relative paths resolved from the file's folder.

    Args:
        overrides: texts 'key.path=value', as given by `--set`.
        defaults: validated values for keys that neither the file nor an override gives.

    Raises:
        InputError: an override is no 'key.path=value', its value is not YAML, or it leads through a value that is no
            mapping.
        FileError: the file is missing or unreadable, or the file or the value of an override has errors; all are listed
            with their lines.
    """
    return _run_from_yaml(_keys_in(read_yaml(path), overrides), overrides, defaults)


def run_of(folder: Path, overrides: tuple[str, ...] = ()) -> Run:
    """Return the settings in a run folder's run.yaml, with overrides applied.

    Args:
        overrides: texts 'key.path=value', as given by `--set`.

    Raises:
        UntrustedError: the folder or the file belongs to somebody else, or others can write to it.
        InputError: an override is no 'key.path=value', its value is not YAML, or it leads through a value that is no
            mapping.
        FileError: the file is missing or unreadable, or the file or the value of an override has errors.
    """
    return _run_from_yaml(_keys_in(read_yaml(folder / RUN_FILE, owned=True), overrides), overrides, {})


def _run_from_yaml(file: YamlFile, overrides: tuple[str, ...], defaults: Mapping[str, Any]) -> Run:
    value = with_defaults(apply_overrides(file.value, overrides), defaults)
    lines = _without_overridden(file.lines, overrides)
    base = Path(file.path).resolve().parent
    try:
        run: Run = with_absolute_paths(Run.model_validate(value), base)
    except ValidationError as error:
        raise FileError(file.path, [_with_option(m, overrides) for m in validation_errors(error, Run, lines)]) from None
    container = run.container and _resolve_container(run.container, base)
    return run.model_copy(update={"container": container})


def missing_keys(path: Path, overrides: tuple[str, ...], defaults: Mapping[str, Any]) -> list[str]:
    """Return the keys of `defaults`, such as 'cluster.account', that neither the run file nor an override gives.

    Args:
        path: the run file.
        overrides: texts 'key.path=value', as given by `--set`.

    Raises:
        InputError: an override is no 'key.path=value', its value is not YAML, or it leads through a value that is no
            mapping.
        FileError: the file is missing or unreadable, is not YAML, or has no keys.
    """
    given = apply_overrides(_keys_in(read_yaml(path), overrides).value, overrides)
    return [dotted(key) for key, _ in missing_values(given, defaults)]


def _keys_in(file: YamlFile, overrides: tuple[str, ...]) -> YamlFile:
    """Return the file, after checking that it, or an override, has a key.

    Raises:
        FileError: there is no key.
    """
    if not isinstance(file.value, dict) or not (file.value or overrides):
        raise FileError(file.path, [FieldError("", "found no keys; `hpctrain init` writes a commented run file", 1)])
    return file


def _without_overridden(
    lines: dict[tuple[str | int, ...], int], overrides: tuple[str, ...]
) -> dict[tuple[str | int, ...], int]:
    """Return the line number of each key path in the run file. Overridden keys get 0, because the value in the file is
    not the one that an error is about."""
    paths = override_paths(overrides)
    shown = {key: 0 if any(key[: len(path)] == path for path in paths) else line for key, line in lines.items()}
    return {**shown, **dict.fromkeys(paths, 0)}


def _with_option(mistake: FieldError, overrides: tuple[str, ...]) -> FieldError:
    """Return the mistake with the name of the command-line option that gave its value. If the value is a section in
    which options of Slurm set keys, the message names these options: of keys that do not fit together, some may come
    from the file and some from the options.
    """
    if mistake.line == 0:
        return FieldError(mistake.field, f"{mistake.text} (given by {option_for(mistake.field, overrides)})")
    inside = [text for text in overrides if isinstance(text, Override) and text.startswith(f"{mistake.field}.")]
    names = ", ".join(dict.fromkeys(text.option for text in inside))
    return FieldError(mistake.field, f"{mistake.text} (with {names})", mistake.line) if names else mistake


def _resolve_container(container: Container, base: Path) -> Container:
    binds = [item.partition(":") for item in container.binds]
    image = container.image
    if container.runtime != "pyxis" or image.endswith(".sqsh"):  # pyxis takes other names as images in a registry
        image = resolved_path(image, base)
    resolved = [f"{resolved_path(source, base)}{colon}{target}" for source, colon, target in binds]
    return container.model_copy(update={"image": image, "binds": resolved})
