"""The selfcheck as a Slurm job of two nodes."""

from __future__ import annotations

import json

import pytest
from submitted import Project

from hpctrain.records.history.selfcheck import SelfcheckReport

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(600)]


def test_each_node_of_a_job_has_its_rows(project: Project) -> None:
    words = ("selfcheck", "-N", "2", "--only", "fork", "--only", "gloo", "--only", "pipeline", "--json")
    report = SelfcheckReport.from_json(json.loads(project.hpctrain(*words).stdout))
    assert len(report.machines) == 2
    for node in report.machines:
        rows = {row.path: row.verdict for row in report.paths if row.node == node}
        assert rows == dict.fromkeys(
            ["fork server", "gloo, two processes", "train, one process", "pipeline, pp 2"], "ok"
        )
