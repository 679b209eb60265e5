"""The paper's configuration in docs/examples, with a small model: planned by the paper's rules, and trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train_site import Site

from hpctrain.records.plan.plan import Plan

pytestmark = pytest.mark.slow

SMALL = [
    word
    for setting in (
        "model.dims={family: encoder, layers: 8, dim: 64, heads: 4}", "data.seq_len=64", "batch.global=8", "steps=8",
        "compression.warmup_steps=3", "optimizer.lr=0.001", "cluster={kind: local}", "validation.batches=0",
    )
    for word in ("--set", setting)
]  # fmt: skip


def test_the_papers_configuration_trains(site: Site, repository: Path) -> None:
    shutil.copy(repository / "docs/examples/paper/run.yaml", site.path / "paper.yaml")
    degrees = ["--set", "parallel={mode: fixed, dp: 2}"]  # two replicas, so that gradients are compressed
    made = site.command(
        "plan", "paper.yaml", *SMALL, *degrees, "--topology", "four.json", "--nodelist", "local[0-1]",
        "--solver", "paper", "-o", "paper-plan.json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert Plan.read(site.path / "paper-plan.json").solver == "paper"
    done = site.train(
        "paper.yaml", *SMALL, *degrees, "--local", "2", "--topology", "four.json", "--plan", "paper-plan.json"
    )
    assert done.code == 0, done.said
    sent = [row.compression.density for row in done.rows if row.compression is not None]
    assert len(done.rows) == 8
    assert 0.05 <= sent[-1] <= 0.3, "equation (3) keeps 5 to 30 % of the numbers"
