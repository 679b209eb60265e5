"""Writes a starter run: a commented run file that trains as it is, on this machine or its cluster, and a corpus from
text on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_text
from hpctrain.base.errors import FileError, InputError
from hpctrain.base.output_streams import printable
from hpctrain.base.package_data import render_template
from hpctrain.corpus.input.sample_text import SAMPLE_TEXT_BYTES, find_sample_text
from hpctrain.corpus.prepare.options import PrepareOptions, Progress, no_progress
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.corpus.prepare.shards import check_target
from hpctrain.launch.slurm_job.starter_cluster import StarterCluster
from hpctrain.records.corpus import INDEX_NAME, CorpusIndex
from hpctrain.records.format.yaml_file import parse_yaml
from hpctrain.records.model.families import PRESETS
from hpctrain.records.run.cluster import Cluster
from hpctrain.records.run.objective import resolved_objective
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.run import Run, read_run

_TEMPLATE = Path(__file__).with_name("starter.yaml.j2")


@dataclass(frozen=True)
class Starter:
    """The values that `hpctrain init` asks for or sets in a starter run; other keys of its run file have defaults."""

    name: str = "first"
    preset: str = "tiny-1m"
    steps: int = 200
    seed: int = 0
    nodes: int = 2
    """Number of virtual nodes on this machine."""
    seq_len: int = 128
    """Tokens per sequence."""
    batch: int = 16
    """Sequences per step."""
    lr: float = 1e-4
    """Learning rate; the default is that of the paper's experiments (section 4.1)."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    data: str = "data"
    """Folder of the corpus, relative to the run file's folder."""
    tokenizer: str = "train:4096"
    """Tokenizer of the corpus: `train:4096` trains one with 4,096 tokens."""
    text_bytes: int = SAMPLE_TEXT_BYTES
    """Bytes of text to find on this machine for the corpus."""
    cluster: StarterCluster | None = None
    """What the run asks of a Slurm cluster, which replaces `nodes`; None: it trains on this machine."""

    @property
    def run(self) -> Run:
        """The content of the run file.

        Raises:
            FileError: a value is not allowed.
        """
        return Run.from_json(parse_yaml(render(self)).value, "run.yaml")


@dataclass(frozen=True)
class WrittenStarter:
    """The run file that `hpctrain init` wrote, and the corpus beside it if one was made."""

    run_file: Path
    run: Run
    data: Path
    """The corpus folder; it exists only if `index` is not None."""
    index: CorpusIndex | None
    text_source: str
    """A line that says where the corpus is from; '' if no corpus was asked for."""


def write_starter(
    run_file: Path, starter: Starter, *, with_data: bool, force: bool = False, progress: Progress = no_progress
) -> WrittenStarter:
    """Write a run file and, with `with_data`, the corpus beside the run file; return what was written.

    Args:
        force: whether to replace an existing run file, and with `with_data` an existing corpus.
        progress: called with the progress of the corpus's preparation.

    Raises:
        InputError: the run file exists and `force` is False, a value is not allowed, the corpus folder cannot be used,
            or this machine has no text (manual pages, licences, documents of packages) to make a corpus of.
        StorageError: a file cannot be written.
        HpctrainError: a text changed while it was read, or a process that prepares the corpus was killed.
    """
    check_starter(run_file, starter, force)
    data = run_file.parent / starter.data
    index, text_source = None, ""
    if with_data:
        index, text_source = _corpus(data, starter, force, progress)
    with storage_errors(run_file):
        run_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(run_file, render(starter, run_file.name))
    return WrittenStarter(run_file, read_run(run_file), data, index, text_source)


def check_starter(run_file: Path, starter: Starter, force: bool) -> None:
    """Check that the run file may be written, and that the values of the starter run are allowed.

    Raises:
        InputError: the run file exists and `force` is False, or the path is a folder.
        FileError: a value is not allowed.
    """
    if run_file.is_dir():
        raise InputError(f"{run_file}: found a folder; name the run file in it, for instance {run_file / 'run.yaml'}")
    if run_file.exists() and not force:
        raise InputError(f"{run_file}: the file exists; add --force to replace it, or name another one")
    Run.from_json(parse_yaml(render(starter)).value, str(run_file))


def render(starter: Starter, file_name: str = "run.yaml") -> str:
    """Return the text of the starter's run file.

    Args:
        file_name: the run file's name, for the commands in its comments.
    """
    preset = PRESETS.get(starter.preset)
    return render_template(
        _TEMPLATE,
        {"scalar": _scalar, "comment": printable},
        file_name=file_name,
        **{key: getattr(starter, key) for key in Starter.__dataclass_fields__ if key != "lr"},
        lr=f"{starter.lr:g}",
        objective=resolved_objective(None, preset).mode if preset else "",
        recovery=Recovery(),
        save_notice_s=Cluster.model_fields["save_notice_s"].default,
    )


def _scalar(text: str) -> str:
    """Return `text` as a YAML scalar, quoted only if YAML would read it as something else."""
    try:
        plain = bool(parse_yaml(f"[{text}]").value == [text])
    except FileError:
        plain = False
    return text if plain else json.dumps(text)


def _corpus(folder: Path, starter: Starter, force: bool, progress: Progress) -> tuple[CorpusIndex, str]:
    if (folder / INDEX_NAME).is_file() and not force:
        return CorpusIndex.read(folder / INDEX_NAME), f"{folder}: kept the corpus that was there"
    check_target(folder, force)
    text = find_sample_text(starter.text_bytes)
    if not text.files:
        raise InputError(
            f"{folder}: found no text on this machine to train on; prepare your own with "
            f"`hpctrain data prepare TEXT... -o {folder}`"
        )
    options = PrepareOptions(tokenizer=starter.tokenizer, force=force)
    return prepare(text.files, folder, options, progress), text.description
