"""`hpctrain probe --prior FILE`: where it is refused, and its way to the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import InputError
from hpctrain.base.package_data import package_data_path
from hpctrain.cli.commands import topology as topology_file
from hpctrain.launch import probe as probe_launch
from hpctrain.launch.probe import ProbeRequest, probe_argv
from hpctrain.probe.pair_selection.switches import switches_of
from hpctrain.records.topology.topology import Fabric, NodeCluster, Topology


@pytest.fixture
def prior(tmp_path: Path) -> Path:
    clusters = [
        NodeCluster(id="top", level=2, members=["local0", "local1", "local2"], source="slurm"),
        NodeCluster(id="a.0", members=["local0", "local1"], source="slurm"),
    ]
    known = Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    known.model_copy(update={"fabric": Fabric(clusters=clusters)}).write(tmp_path / "prior.json")
    return tmp_path / "prior.json"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--local", "4", "--mode", "sampled"], "not with --local"),
        (["-N", "4"], "the mode is full"),
        (["-N", "4", "--mode", "sampled"], "it names no switches"),
        (["-N", "4", "--mode", "health"], "it names no switches"),
    ],
)
def test_a_prior_that_cannot_help_is_refused_before_a_job_is_queued(tmp_path: Path, argv: list[str], said: str) -> None:
    flat = package_data_path("topology", "laptop-4-nodes.json")

    result = CliRunner().invoke(
        topology_file.probe_command, [*argv, "--prior", str(flat), "-o", str(tmp_path / "t.json")]
    )  # fmt: skip

    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)
    assert not (tmp_path / "t.json").exists()


def test_the_file_reaches_the_nodes_by_its_whole_path(tmp_path: Path, prior: Path, monkeypatch) -> None:
    asked = []

    def probe_job(*words):
        asked.append(words)
        return Topology.read(package_data_path("topology", "laptop-4-nodes.json"))

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(probe_launch, "probe_job", probe_job)
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(
        topology_file.probe_command, ["-N", "4", "--mode", "sampled", "--prior", prior.name, "-o", "t.json"]
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert (asked[0][-2].mode, asked[0][-2].prior) == ("sampled", Path(prior.name))
    argv = probe_argv(tmp_path, ProbeRequest("cpu", 0, "sampled", Path(prior.name)))
    assert argv[argv.index("--prior") + 1] == str(prior)


def test_switches_are_read_from_the_highest_down(prior: Path) -> None:
    assert switches_of(Topology.read(prior)) == {"local0": ["top", "a.0"], "local1": ["top", "a.0"], "local2": ["top"]}
