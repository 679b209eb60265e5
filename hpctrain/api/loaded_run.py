"""A run as an object: its files as values, its status, and the model of a checkpoint."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from hpctrain.api.metric_columns import metric_columns
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError
from hpctrain.base.loading import load
from hpctrain.base.process import SystemRunner
from hpctrain.checkpoint.published import listed, step_of
from hpctrain.corpus.read.tokens import Split
from hpctrain.hf.output import ExportFormat
from hpctrain.hf.tensors import BYTES, shard_bytes
from hpctrain.jobs.run_status import run_status
from hpctrain.launch.checkpoints import read_checkpoint
from hpctrain.launch.evaluate import CheckpointEvaluation, evaluate
from hpctrain.launch.export import ExportResult, export
from hpctrain.launch.predicted_step import predicted_spans
from hpctrain.records.history.run_log import Event, MetricRow, last_row_of_each_step, read_events, read_metrics
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run, run_of
from hpctrain.records.topology.topology import Topology
from hpctrain.report.html.render import write_report
from hpctrain.report.status import RunStatus
from hpctrain.runs.code_copy import CODE_FOLDER
from hpctrain.runs.folder import RunFolder, check_trusted, newest_plan
from hpctrain.runs.locate import find_run, job_id

if TYPE_CHECKING:
    from torch import nn


def load_run(name: str | os.PathLike[str]) -> LoadedRun:
    """Return a run as an object. The run may be waiting, in progress or over.

    Args:
        name: the run folder, the run's name (of several runs the newest is taken) or the id of one of its jobs. Names
            and ids are looked up in ./runs, then in $HPCTRAIN_RUNS, then among the runs that you started anywhere.

    Raises:
        InputError: there is no such run; the message lists the nearest names.
        UntrustedError: the folder is another user's, or others can write to it.
        FileError: the folder's run.yaml is wrong.
    """
    folder = find_run(os.fspath(name), os.environ, Path.cwd()).resolve()
    run_of(folder)
    return LoadedRun(folder)


@dataclass(frozen=True)
class LoadedRun:
    """A run. Each access to a property reads the run's files again, so the values of a run in progress grow.

    Every property raises FileError if its file is damaged, and UntrustedError if others can write to it.
    """

    folder: Path
    """The run folder, as an absolute path."""

    @property
    def name(self) -> str:
        """The run's name, as in the run file."""
        return self.run.name

    @property
    def run(self) -> Run:
        """The run file of the run, with all keys resolved."""
        return run_of(self.folder)

    @property
    def job_id(self) -> str | None:
        """Id of the run's newest Slurm job; for a run that `submit` started on this machine without Slurm, the id of
        the background process that trains it; None for a run of `train`."""
        return job_id(self.folder)

    @property
    def topology(self) -> Topology | None:
        """The measured topology of the run's nodes; None until it is measured."""
        path = self.folder / "topology.json"
        return Topology.read(path, owned=True) if path.exists() else None

    @property
    def plan(self) -> Plan | None:
        """The newest plan of the run; None until one is made."""
        path = newest_plan(self.folder)
        return None if path is None else Plan.read(path, owned=True)

    @property
    def metrics(self) -> dict[str, np.ndarray[Any, Any]]:
        """The figures of the steps that led to the final model, as columns: name -> array of shape (steps,).

        The names are the keys of metrics.jsonl, such as `step`, `loss` (nats per target), `step_time_s` and
        `tokens_per_s`; parts have names with dots, such as `bytes_sent.dp` (bytes) and `stage_time_s.0`. A figure that
        a step does not have is NaN. `pandas.DataFrame(run.metrics)` makes a table of the columns.
        """
        return metric_columns(last_row_of_each_step(self.metric_rows))

    @property
    def metric_rows(self) -> list[MetricRow]:
        """Every row of metrics.jsonl, in the order of writing; a step that was repeated after a fault has several."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def events(self) -> list[Event]:
        """What happened in the run, the oldest first."""
        return read_events(self.folder / "events.jsonl")

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The run's attempts, the oldest first: nodes, start, end and reason of the end, as in attempts.jsonl."""
        return RunFolder(self.folder).attempts()

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the run's checkpoints, ascending. Their files are verified when one is loaded."""
        return [step_of(path) for path in listed(self.folder / "checkpoints")]

    def status(self) -> RunStatus:
        """Return the status of the run, by its files and by Slurm; `status().to_json()` is what
        `hpctrain status --json` prints.

        Raises:
            FileError: a file of the run is damaged.
            UntrustedError: the run folder or a file in it belongs to another user, or others can write to it.
        """
        return run_status(self.folder)

    def load_checkpoint(self, step: int | None = None, *, model: nn.Module | None = None) -> nn.Module:
        """Return a torch module with the weights of a checkpoint, on this process alone, whatever plan saved it.

        The run's own model is built on the CPU, in the dtype of the saved weights (float32), in evaluation mode.
        Called with token ids of shape (batch, sequence), it returns logits of shape (batch, sequence, vocabulary); an
        encoder-decoder also takes `decoder_tokens`. Building a model of your own (model.import) runs the run's copy of
        your code.

        Args:
            step: step of the checkpoint; 0: the model before training; None: the newest checkpoint that is whole.
            model: an existing module with the same parameters, which gets the weights and is returned. Its device, its
                dtype and its mode stay as they are.

        Raises:
            InputError: the run has no such checkpoint, others can write to the run folder, or `model` has other
                parameters.
            CheckpointError: the checkpoint's files differ from what was written.
        """
        check_trusted(self.folder)
        run = self.run
        spec = run.spec()
        whole = load("hpctrain.worker.whole_model")

        def read(checkpoint: Path | None) -> nn.Module:
            if model is not None:
                whole.load_weights(model, run, checkpoint)
                return model
            if not isinstance(spec, ImportedSpec):
                built: nn.Module = whole.whole_model(run, checkpoint)
                return built
            code = self.folder / CODE_FOLDER
            whole.check_code_is_of_run(spec, code)
            before = list(sys.path)
            sys.path.insert(0, str(code))
            try:
                built = whole.whole_model(run, checkpoint)
            finally:
                sys.path[:] = before
            return built

        return read_checkpoint(self.folder, step, spec.sha256(), read)

    def evaluate(
        self, *data: str | os.PathLike[str], step: int | None = None, split: Split = "all", samples: int | None = None,
        processes: int = 1, pp: int = 1,
    ) -> list[CheckpointEvaluation]:  # fmt: skip
        """Return loss (nats per target) and perplexity of a checkpoint on other data, in the order of `data`. Processes
        of their own compute them.

        Args:
            data: folders made by `hpctrain data prepare` with the run's tokenizer, or text (files, folders).
            step: step of the checkpoint; 0: the model before training; None: the newest checkpoint that is whole.
            split: the part of corpus folders: all, train or valid.
            samples: most sequences of each item; None: all.
            processes: number of processes of this machine that share the sequences; with GPUs, one a GPU.
            pp: number of pipeline stages into which each copy of the model is cut; divides `processes`.

        Raises:
            InputError: there is no such checkpoint, the data is missing or has another tokenizer than the run, or the
                model cannot be cut into `pp` stages.
            CheckpointError: the checkpoint's files differ from what was written.
            HpctrainError: a process failed.
        """
        if not data:
            raise InputError("data: none was given; name corpus folders, or text")
        if split not in get_args(Split):
            raise InputError(f"split: found {split!r}; allowed: {', '.join(get_args(Split))}")
        for name, count in (("samples", samples), ("processes", processes), ("pp", pp)):
            if count is not None and count < 1:
                raise InputError(f"{name}: found {count}; allowed: 1 or more")
        named = [os.fspath(item) for item in data]
        return evaluate(self.folder, named, step, split, samples, SystemRunner(), processes, pp)[1]

    def export(
        self, output: str | os.PathLike[str], *, step: int | None = None, dtype: str = "float32",
        max_shard_size: str = "5GB", force: bool = False, processes: int = 1, file_format: ExportFormat = "hf",
    ) -> ExportResult:  # fmt: skip
        """Write a checkpoint as a Hugging Face folder, or for a model of your own as a folder of safetensors files, and
        return a summary of the folder. With the `file_format` dcp, torch's distributed checkpoint takes the place of
        the safetensors files.

        Args:
            output: folder to make.
            step: step of the checkpoint; 0: the model before training; None: the newest checkpoint that is whole.
            dtype: type of the numbers: float32, bfloat16 or float16.
            max_shard_size: size of the largest file, such as 5GB.
            force: replace a model that lies in `output`.
            processes: number of processes that share the tensors; each holds one tensor at a time.
            file_format: hf for safetensors files, dcp for torch's distributed checkpoint.

        Raises:
            InputError: there is no such checkpoint, or `output` may not be replaced.
            CheckpointError: the checkpoint's files differ from what was written.
            StorageError: the folder cannot be written.
            HpctrainError: a process that writes the tensors failed.
        """
        if dtype not in BYTES:
            raise InputError(f"dtype: found {dtype!r}; allowed: {', '.join(BYTES)}")
        if processes < 1:
            raise InputError(f"processes: found {processes}; allowed: 1 or more")
        if file_format not in get_args(ExportFormat):
            raise InputError(f"file_format: found {file_format!r}; allowed: {', '.join(get_args(ExportFormat))}")
        size = shard_bytes(max_shard_size)
        return export(self.folder, Path(output), step, dtype, size, force, SystemRunner(), processes, file_format)

    def report(self, output: str | os.PathLike[str]) -> Path:
        """Write the run's report, one HTML file, and return its path.

        Raises:
            InputError: a file of the run is damaged or untrusted (it belongs to another user, or others can write to
                it).
            StorageError: the file cannot be written.
        """
        path = Path(output)
        write_report(self.folder, path, SystemClock().wall(), predicted_spans)
        return path
