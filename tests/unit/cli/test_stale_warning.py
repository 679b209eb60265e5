"""What a person is told who gives a topology that may no longer be true."""

from pathlib import Path

import pytest

from hpctrain.base.package_data import package_data_path
from hpctrain.cli.options.given_topology import warn_if_stale
from hpctrain.records.topology.topology import Topology

LAPTOP = Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
AGED = LAPTOP.model_copy(
    update={"provenance": LAPTOP.provenance.model_copy(update={"created": "2020-01-01T00:00:00Z"})}
)


def test_an_old_topology_is_told_on_stderr_and_none_is_no_matter(capsys: pytest.CaptureFixture[str]) -> None:
    warn_if_stale(AGED)
    warn_if_stale(None)

    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(" is ")[0] for line in told.err.splitlines()] == ["warning: the topology"]


@pytest.mark.parametrize(("allocated", "lines"), [("local[0-3]", 0), ("local[0-2]", 1), ("x1", 2), ("", 0), ("x[1", 0)])
def test_inside_an_allocation_its_nodes_are_compared(
    allocated: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", allocated)

    warn_if_stale(LAPTOP, max_age_days=1e6)

    assert len(capsys.readouterr().err.splitlines()) == lines


def test_plan_train_and_submit_warn(hpctrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AGED.write(tmp_path / "t.json")
    (tmp_path / "run.yaml").write_text(
        "steps: 1\nmodel: {dims: {layers: 4, dim: 64, heads: 4, vocab: 256}}\n"
        "data: {train: [/data], seq_len: 64}\nbatch: {global: 64}\n"
    )
    monkeypatch.setattr("hpctrain.launch.preflight.prepare.resolve_run", lambda run, *_: (run, run.spec()))
    given = [str(tmp_path / "run.yaml"), "--topology", str(tmp_path / "t.json")]
    local = ["--set", "cluster.nodes=4", "--set", "cluster.kind=local", "--dry-run"]

    for verb, more in (("plan", ["-o", str(tmp_path / "p.json")]), ("train", local), ("submit", local)):
        done = hpctrain(verb, *given, *more)

        assert done.exit_code == 0, done.output
        assert "warning: the topology is " in done.stderr, verb
        assert "days are allowed" in done.stderr, verb
    assert "warning" not in hpctrain("plan", *given, "-o", str(tmp_path / "p.json"), "--max-age", "100000").stderr
