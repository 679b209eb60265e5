"""Small runs for benches and the selfcheck: makes a run folder with a small corpus, and a plan with given degrees."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan, Replica, Stage, ZeroLevel
from hpctrain.records.run.adapt import Adapt
from hpctrain.records.run.data import Data
from hpctrain.records.run.model_choice import Model
from hpctrain.records.run.run import Batch, Checkpoint, Run, Validation

BYTES_VOCABULARY = 320
"""Vocabulary size of the models that train on the corpus of `make_corpus`, whose tokens are bytes."""
NEVER = 10**9
"""A step number that no bench reaches."""


def make_corpus(folder: Path) -> None:
    """Write a corpus of hpctrain's own source text, which every machine has. Its tokens are bytes.

    Raises:
        InputError: the folder is not empty, or another command is at work there.
        StorageError: the corpus cannot be written.
    """
    prepare([Path(hpctrain.__file__).parent], folder, PrepareOptions(valid_fraction=0.1, limit_bytes=400_000))


@contextlib.contextmanager
def temporary_corpus() -> Iterator[Path]:
    """Yield a temporary folder with the corpus that `make_corpus` writes, in its folder `corpus`. The temporary folder
    is removed when the `with` block ends.

    Raises:
        StorageError: the corpus cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-small-") as name:
        make_corpus(Path(name, "corpus"))
        yield Path(name)


def make_run(folder: Path, corpus: Path, spec: DecoderSpec, rows: int, seq_len: int, **keys: Any) -> Run:
    """Create the run folder `folder`, without plans, and return its run, which is that of `plain_run`. The other
    arguments are those of `plain_run`.

    Raises:
        OSError: the folder exists, or its parent folder does not.
        StorageError: the run file cannot be written.
    """
    run = plain_run(corpus, spec, rows, seq_len, **keys)
    folder.mkdir()
    run.write(folder / "run.yaml")
    return run


def plain_run(corpus: Path, spec: DecoderSpec, rows: int, seq_len: int, **keys: Any) -> Run:
    """Return a run that has more steps than anybody waits for, makes no checkpoints and no validations, and keeps its
    plan while no node is lost, unless `keys` say so.

    Args:
        corpus: corpus folder with the data for training.
        spec: the run's model.
        rows: sequences in the global batch.
        keys: further keys of the run file.
        seq_len: tokens of a sequence.
    """
    settings: dict[str, Any] = {
        "steps": NEVER,
        "checkpoint": Checkpoint(every=NEVER),
        "validation": Validation(batches=0),
        "adapt": Adapt(mode="off"),
    }
    return Run(
        model=Model(dims=spec),
        data=Data(train=[str(corpus)], seq_len=seq_len),
        batch=Batch.model_validate({"global": rows}),
        **(settings | keys),
    )


def make_plan(
    pp: int, dp: int, layers: int, micro_batch: int, micro_batches: int, *, tp: int = 1, zero: ZeroLevel = 0,
    chunks: int = 1, devices: Sequence[str] = (),
) -> Plan:  # fmt: skip
    """Return a plan with equal stages and equal replicas. Its schedule is 1f1b, or interleaved_1f1b with several stages
    on a pipeline rank.

    Args:
        layers: number of blocks of the model.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches of a replica in a step.
        zero: ZeRO level.
        chunks: stages of each pipeline rank.
        devices: pp × dp × tp devices, 'node:device'. Default: the CPUs of as many virtual nodes.
    """
    devices = list(devices) or [f"local{index}:cpu0" for index in range(pp * dp * tp)]
    count = pp * chunks
    cuts = [(stage * layers // count, (stage + 1) * layers // count) for stage in range(count)]
    replicas = [
        Replica(
            sequences=micro_batch * micro_batches,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            devices=[devices[(stage % pp * dp + replica) * tp :][:tp] for stage in range(count)],
        )
        for replica in range(dp)
    ]
    stages = [Stage(layers=cut) for cut in cuts]
    schedule = "1f1b" if chunks == 1 else "interleaved_1f1b"
    return Plan(pp=pp, dp=dp, tp=tp, zero=zero, schedule=schedule, stages=stages, replicas=replicas, ranks=devices)
