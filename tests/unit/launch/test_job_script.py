"""The batch script: byte for byte what stands in tests/golden, and what must never get into it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.launch.job_script import directives, render_job
from hpctrain.launch.submission import preview
from hpctrain.node import run as node_run
from hpctrain.node.attempt import decide_end
from hpctrain.records.run import Run

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "job.sh"


def run(**cluster: object) -> Run:
    return Run.from_json(
        {
            "name": "gpt",
            "steps": 10,
            "model": {"preset": "tiny-1m"},
            "data": {"train": ["/data"]},
            "batch": {"global": 8},
            "cluster": {"kind": "slurm", "nodes": "3-4", **cluster},
        }
    )


def neutral(text: str) -> str:
    """The script without what differs from machine to machine."""
    return text.replace(sys.executable, "/usr/bin/python3").replace(__version__, "0.0.0")


def test_the_script_is_the_golden_one() -> None:
    asked = run(
        partition="gpu", account="my project", qos="normal", time="1:30:00", device="cuda", devices_per_node=4,
        setup=["module load cuda", "source ~/venv/bin/activate"], sbatch=["--constraint=a100|h100", "--mem=0"],
    )  # fmt: skip
    text = neutral(preview(asked, Path("/shared/runs/gpt 1")))
    assert text == GOLDEN.read_text()


def test_the_script_is_valid_bash(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(preview(run(), Path("/shared/it's here/$HOME/runs/x")))
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n", str(script)], check=False).returncode == 0
    assert "/shared/it" in script.read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nodes=2"], "--nodes is set by hpctrain"),
        (["--requeue"], "--requeue is set by hpctrain"),
        (["--no-kill"], "--no-kill is set by hpctrain"),
        (["--signal=B:USR1@60"], "--signal is set by hpctrain"),
        (["--partition=nosuch"], "found --partition; write cluster.partition"),
        (["--time 10"], "found --time; write cluster.time"),
        (["--gpus-per-node=4"], "write cluster.devices_per_node"),
        (["--export=NONE"], r"set yours in cluster\.setup"),
        (["-N 2"], "write it as a long option"),
        (["--comment=a\n#SBATCH --nodes=9"], "line break"),
    ],
)
def test_options_that_would_break_the_recovery_are_refused(options: list[str], text: str) -> None:
    with pytest.raises(InputError, match=text):
        directives(run(sbatch=options), Path("/shared/run"))


def test_a_line_break_in_setup_is_refused() -> None:
    with pytest.raises(InputError, match=r"cluster\.setup: .* line break"):
        render_job(run(setup=["a\nb"]), Path("/shared/run"), "true")


def test_a_task_without_its_attempts_number_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 0 in every attempt, its log files and events would go under those of the first one."""
    monkeypatch.delenv("HPCTRAIN_ATTEMPT", raising=False)
    with pytest.raises(SystemExit):
        node_run.main(["--folder", "/shared/run"])
    assert "--attempt" in capsys.readouterr().err
    monkeypatch.setenv("HPCTRAIN_ATTEMPT", "3")
    assert node_run._parse(["--folder", "/shared/run"]).attempt == 3


@pytest.mark.parametrize(
    ("code", "state", "preempted", "requeue"),
    [
        (0, "RUNNING", False, False),
        (75, "RUNNING", False, True),
        (75, "RUNNING", True, True),
        (75, "CANCELLED", False, False),
        (75, None, False, False),
        (75, "PENDING", False, False),
        (75, "COMPLETING", False, False),
        (1, "RUNNING", False, False),
        (4, "RUNNING", False, False),
    ],
)
def test_only_a_run_that_stopped_at_a_checkpoint_goes_back_to_the_queue(
    code: int, state: str | None, preempted: bool, requeue: bool
) -> None:
    assert decide_end(code, state, preempted).requeue is requeue
