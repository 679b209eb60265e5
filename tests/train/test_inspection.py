"""A run that can be looked into: the trace of a step, and a hash that says whether two runs gave the same weights."""

from __future__ import annotations

import gzip
import json
import re

import pytest
from train_site import Site

pytestmark = pytest.mark.slow

TWO_STAGES = (
    "run.yaml", "--local", "2", "--topology", "four.json", "--set", "steps=4",
    "--set", "objective={mode: masked}", "--set", "data.valid={own: data}",
    "--set", "checkpoint.every=2", "--set", "parallel={mode: fixed, pp: 2, micro_batch: 2}",
    "--set", "deterministic=true",
)  # fmt: skip


def test_a_profiled_deterministic_run_gives_traces_and_the_weights_of_the_same_run_without(site: Site) -> None:
    first = site.train(*TWO_STAGES, "--profile", "4")
    assert first.code == 0, first.said
    assert first.folder is not None
    assert f"profile: 2 traces of step 4: {first.folder}/profile/step-4.rank-*.json.gz; open them at " in first.said
    spans = []
    for rank in range(2):
        with gzip.open(first.folder / "profile" / f"step-4.rank-{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        spans.append({event["name"] for event in events if event.get("ph") == "X"})
    assert sorted(path.name for path in (first.folder / "profile").iterdir()) == [
        "step-4.rank-0.json.gz", "step-4.rank-1.json.gz",
    ]  # fmt: skip
    front, back = spans if "send output of stage 0 mb 0 to rank 1" in spans[0] else reversed(spans)
    for micro_batch in range(4):
        assert {f"forward stage 0 mb {micro_batch}", f"backward stage 0 mb {micro_batch}"} <= front
        assert {f"forward stage 1 mb {micro_batch}", f"backward stage 1 mb {micro_batch}"} <= back
        assert any(re.match(rf"send output of stage 0 mb {micro_batch} to rank \d", name) for name in front)
        assert any(re.match(rf"recv gradient for stage 0 mb {micro_batch} from rank \d", name) for name in front)
        assert any(re.match(rf"recv output of stage 0 mb {micro_batch} from rank \d", name) for name in back)
        assert any(re.match(rf"send gradient for stage 0 mb {micro_batch} to rank \d", name) for name in back)
    assert {"reduce dp", "optimizer", "checkpoint copy"} <= front & back
    last = first.rows[-1]
    assert last.valid_loss is not None
    assert last.valid_sets is not None
    told = site.command("eval", str(first.folder), "data", "--samples", "8", "--json")
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    assert (answer["step"], answer["data"][0]["tokens"], answer["data"][0]["targets"]) == (4, 8 * 64, 8 * 10)
    for key, value in last.valid_sets["own"]:
        assert answer["data"][0][key] == pytest.approx(value, rel=1e-5)
    second = site.train(*TWO_STAGES)
    hashes = [outcome.events[-1].data["weights_sha256"] for outcome in (first, second)]
    assert len(hashes[0]) == 64
    assert hashes[0] == hashes[1]
    status = json.loads(site.command("status", str(first.folder), "--json").stdout)
    assert status["weights_sha256"] == hashes[0]
    assert hashes[0] in site.command("status", str(first.folder)).stdout


def test_a_step_that_the_run_does_not_have_cannot_be_profiled(site: Site) -> None:
    done = site.command("train", "run.yaml", "--local", "1", "--profile", "50")
    assert done.returncode == 2
    assert "profile.step is 50, and the run has 24 steps" in done.stderr
