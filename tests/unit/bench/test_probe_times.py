"""`hpctrain bench probe --times`: which pairs count as measured; and which options go together."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from hpctrain.base.package_data import package_data_path
from hpctrain.bench.probe.lab_probe import time_row
from hpctrain.cli.main import cli
from hpctrain.records.topology.topology import Topology


def test_a_pair_counts_with_both_figures_of_both_directions() -> None:
    whole = Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    first, *others = whole.fabric.links
    half = first.model_copy(update={"ba": first.ba.model_copy(update={"latency_s": None})})
    lacking = whole.model_copy(update={"fabric": whole.fabric.model_copy(update={"links": [half, *others]})})

    assert [(row.pairs, row.complete) for row in (time_row("a", whole, 1.0), time_row("b", lacking, 1.0))] == [
        (6, 6),
        (6, 5),
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--faults", "--times"], "--faults: not with --times"),
        (["--times", "--rate", "50mbit"], "--rate: not with --times"),
        (["--clean", "3"], "--clean: only with --faults"),
        (["--times", "--clean", "3"], "--clean: only with --faults"),
    ],
)
def test_options_of_another_kind_are_refused(argv: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "probe", *argv])

    assert result.exit_code != 0
    assert said in str(result.exception) + result.output
