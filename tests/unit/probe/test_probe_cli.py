"""`hpctrain probe` and `hpctrain topology`: exit codes, and nothing but JSON on stdout with --json."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from hpctrain.base.package_data import package_data_path
from hpctrain.cli.commands import topology as topology_file
from hpctrain.records.topology.topology import Topology, Verdict


def hpctrain(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpctrain", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_probe_writes_the_file_and_prints_json_on_stdout_only(tmp_path: Path) -> None:
    done = hpctrain("probe", "--local", "2", "--json", "--seed", "5", "-o", "t.json", cwd=tmp_path)

    printed = json.loads(done.stdout)
    written = Topology.read(tmp_path / "t.json")
    assert Topology.from_json(printed) == written
    assert done.returncode == topology_file.EXIT_CODES[written.verdict.status]
    assert written.provenance.seed == 5
    assert "verdict" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "probe", "--local", "2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert command.stderr is not None
    # By then all modules are loaded: Python loses an interrupt that comes within a callback of an import.
    assert command.stderr.readline(), "it ended before anything was measured"
    children = psutil.Process(command.pid).children()
    os.kill(command.pid, signal.SIGINT)
    told = command.communicate(timeout=600)

    assert len(children) == 2
    assert command.returncode == 1, told
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "code"), [("go", 0), ("warn", 3), ("refuse", 4)])
def test_the_exit_code_is_the_verdict(tmp_path: Path, monkeypatch, status: str, code: int) -> None:
    topology = Topology.read(package_data_path("topology", "laptop-4-nodes.json"))
    judged = topology.model_copy(update={"verdict": Verdict(status=status)})
    monkeypatch.setattr("hpctrain.launch.probe.probe_local", lambda *_args: judged)

    result = CliRunner().invoke(topology_file.probe_command, ["--local", "4", "-o", str(tmp_path / "t.json")])

    assert result.exit_code == code
    assert Topology.read(tmp_path / "t.json") == judged
    assert f"verdict: {status}" in result.output


def test_what_the_job_asks_for_comes_from_the_site_where_nothing_was_said(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "hpctrain").mkdir()
    values = "{account: physics, partition: big}"
    (tmp_path / "hpctrain" / "site.yaml").write_text(f"profiles:\n  here:\n    cluster: {values}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SBATCH_ACCOUNT", "chemistry")
    monkeypatch.setenv("SBATCH_QOS", "short")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked = []

    def probe_job(job, *_args):
        asked.append(job)
        return Topology.read(package_data_path("topology", "laptop-4-nodes.json"))

    monkeypatch.setattr("hpctrain.launch.probe.probe_job", probe_job)
    words = ["-N", "4", "-p", "small", "-o", str(tmp_path / "t.json")]
    result = CliRunner().invoke(topology_file.probe_command, words)
    assert [(job.partition, job.account, job.qos) for job in asked] == [("small", "physics", "short")]
    assert "account: physics, from profile 'here' of " in result.stderr
    assert "qos: short, from SBATCH_QOS" in result.stderr


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["probe"], "give one of --local N"),
        (["probe", "--local", "2", "-o", "absent/t.json"], "there is no folder absent"),
        (["probe", "--local", "0"], "0 is not in the range"),
        (["topology", "show", "absent.json"], "no such file"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(tmp_path: Path, argv: list[str], text: str) -> None:
    done = hpctrain(*argv, cwd=tmp_path)

    assert done.returncode == 2
    assert text in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_show_prints_devices_matrix_and_verdict(tmp_path: Path) -> None:
    done = hpctrain("topology", "show", str(package_data_path("topology", "laptop-4-nodes.json")), cwd=tmp_path)

    assert done.returncode == 0
    for text in ("loopback", "local3", "Latency", "Bandwidth", "verdict: go"):
        assert text in done.stdout


def test_diff_prints_what_changed(tmp_path: Path) -> None:
    laptop = package_data_path("topology", "laptop-4-nodes.json")
    Topology.read(laptop).only(["local0"]).write(tmp_path / "one.json")

    done = hpctrain("topology", "diff", str(laptop), "one.json", "--json", cwd=tmp_path)

    printed = json.loads(done.stdout)
    assert done.returncode == 0
    assert [row["what"] for row in printed["differences"]] == ["local1", "local2", "local3"]
    assert printed["summary"] == "3 node(s) went"
