"""An encoder and an encoder-decoder learn real text by their own objectives, through the commands a person types."""

from __future__ import annotations

import json
import math

import pytest
from train_site import Gate, Outcome, Site, once_there, small_topology, wait_for, wait_for_step, worker_of

from hpctrain.checkpoint import published
from hpctrain.records.history.run_log import last_row_of_each_step
from hpctrain.records.run.run import read_run

STEPS, EVERY = 40, 8
UNTRAINED = math.log(320)
"""Loss of a guess among the vocabulary of bytes."""
SMALL = (
    f"steps={STEPS}",
    "optimizer.lr=4e-3",
    f"checkpoint.every={EVERY}",
    f"validation={{every: {EVERY}, batches: 4}}",
)
ENCODER = ("model={dims: {family: encoder, layers: 2, dim: 64, heads: 2}}", "parallel={mode: fixed, pp: 1}")
ENCODER_DECODER = (
    "model={dims: {family: encoder_decoder, layers: 2, dim: 64, heads: 2}}",
    "parallel={mode: fixed, pp: 2, micro_batch: 4}",
    "recovery.memory=off",
)

pytestmark = pytest.mark.slow


def words(*settings: str) -> list[str]:
    return [word for text in (*SMALL, *settings) for word in ("--set", text)]


@pytest.fixture(scope="module")
def encoder(site: Site) -> Outcome:
    return site.train("run.yaml", "--local", "1", "--topology", "one.json", *words(*ENCODER))


@pytest.fixture(scope="module")
def encoder_decoder(site: Site) -> Outcome:
    """The encoder on one node and the decoder on another, whose worker is killed after the first checkpoint."""
    small_topology(2).write(site.path / "seam.json")
    known = set((site.path / "runs").glob("*"))
    gate = Gate(site.path / "gate of encoder_decoder", EVERY + 4)
    argv = ("train", "run.yaml", "--local", "2", "--topology", "seam.json", *words(*ENCODER_DECODER))
    process = site.start(*argv, env=gate.env)
    folder = site.run_folder(known)
    worker = once_there(worker_of, folder, "local1")
    wait_for_step(folder, EVERY + 2)
    wait_for(lambda: bool(published.listed(folder / "checkpoints")), 60, "the first checkpoint")
    worker.kill()
    gate.open()
    said, _ = process.communicate(timeout=800)
    return Outcome(process.returncode, folder, said)


def valid_losses(outcome: Outcome) -> list[float]:
    assert outcome.code == 0, outcome.said
    return [row.valid_loss for row in last_row_of_each_step(outcome.rows) if row.valid_loss is not None]


def test_an_encoder_learns_to_fill_in_hidden_text(encoder: Outcome, site: Site) -> None:
    losses = valid_losses(encoder)
    assert encoder.folder is not None
    assert read_run(encoder.folder / "run.yaml").effective_objective().mode == "masked"
    assert len(losses) == STEPS // EVERY
    assert losses[-1] < min(losses[0], UNTRAINED - 1)
    done = site.command("eval", str(encoder.folder), "data", "--split", "valid", "--samples", "32", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"][0]["loss"] == pytest.approx(losses[-1], abs=1e-5)


def test_an_encoder_decoder_learns_to_write_out_spans(encoder_decoder: Outcome) -> None:
    losses = valid_losses(encoder_decoder)
    assert encoder_decoder.folder is not None
    assert read_run(encoder_decoder.folder / "run.yaml").effective_objective().mode == "span_corruption"
    rows = encoder_decoder.rows
    assert {row.generation for row in rows} == {0, 1}
    assert [row.step for row in last_row_of_each_step(rows)] == list(range(1, STEPS + 1))
    again = {row.step: row.loss for row in rows if row.generation == 1}
    twice = [row for row in rows if row.generation == 0 and row.step in again]
    assert twice
    assert all(row.loss == pytest.approx(again[row.step], abs=1e-5) for row in twice)
    assert losses[-1] < min(losses[0], UNTRAINED - 1)
