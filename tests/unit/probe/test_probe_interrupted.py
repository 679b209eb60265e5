"""A probe that does not come to its end leaves what it measured, and the file says how many rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import HpctrainError
from hpctrain.base.package_data import package_data_path
from hpctrain.cli.commands.topology import probe_command
from hpctrain.launch import probe as probe_launch
from hpctrain.probe.analyse.assemble import assemble
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import JoinedNode, PairResult, ProbeOutcome
from hpctrain.probe.measure.settings import PARTIAL_FILE, ProbeSettings
from hpctrain.records.topology.link import Latency
from hpctrain.records.topology.topology import Topology


@pytest.mark.parametrize("end", [KeyboardInterrupt(), HpctrainError("the job was cancelled")])
def test_what_was_measured_is_written(tmp_path: Path, monkeypatch, end: BaseException) -> None:
    told: list[tuple] = []

    def interrupted(count: int, folder: Path, *rest: object) -> Topology:
        told.append((count, rest[-2].mode))
        Topology.read(package_data_path("topology", "laptop-4-nodes.json")).write(folder / PARTIAL_FILE)
        raise end

    monkeypatch.setattr(probe_launch, "probe_local", interrupted)

    result = CliRunner().invoke(
        probe_command, ["--local", "4", "--mode", "health", "-o", str(tmp_path / "t.json")]
    )  # fmt: skip

    assert result.exit_code == 1
    assert told == [(4, "health")]
    assert Topology.read(tmp_path / "t.json").provenance.rounds_done > 0
    assert "rounds" in result.output


def test_a_topology_of_some_rounds_is_valid_and_says_so() -> None:
    names = [f"n{index}" for index in range(8)]
    outcome = ProbeOutcome(names, rounds_done=1, rounds_planned=35)
    outcome.joined = {name: JoinedNode(addr="10.0.0.1", port=5000, iface="ib0", host=name) for name in names}
    end = PairFigures(latency=Latency(min=1e-6, p50=1e-6, p95=1e-6), bytes_per_s=1e9, n=8)
    outcome.add([PairResult("n1", "n0", False, 1, end, end)], ProbeSettings().bulk_bytes)

    made = assemble(outcome, ProbeSettings(), wall=0.0, partial=True)

    assert Topology.from_json(made.to_json()) == made
    assert (made.provenance.rounds_done, made.provenance.rounds_planned) == (1, 35)
    assert [(link.a, link.b) for link in made.fabric.links] == [("n0", "n1")]
