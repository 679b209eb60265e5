"""`hpctrain demo --model`: each kind of model is a run that says what it learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.demo import NODE_DIES_AT, STARTERS, WORKER_DIES_AT
from hpctrain.launch.starter import render
from hpctrain.records.run import Run
from hpctrain.records.yaml_file import parse_yaml

Call = Callable[..., Any]


@pytest.mark.parametrize(("model", "objective"), [("decoder", "next_token"), ("encoder", "masked")])
def test_a_demo_trains_that_model_by_its_objective(model: str, objective: str) -> None:
    run = Run.from_json(parse_yaml(render(STARTERS[model])).value)
    assert (run.spec().family, run.learned().mode) == (model, objective)
    # There is a checkpoint to go on from at each fault, and steps after the last one.
    assert run.checkpoint.every < WORKER_DIES_AT < NODE_DIES_AT < run.steps


def test_another_model_is_told_what_is_allowed(call: Call, tmp_path: Path) -> None:
    done = call("demo", "--model", "bert")
    assert done.code == 2
    assert "'bert' is not one of 'decoder', 'encoder'" in done.err
    assert not list(tmp_path.iterdir())
