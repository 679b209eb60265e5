"""The batch script: byte for byte what stands in tests/golden, and what must never get into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import slurm_run

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.base.module_argv import PACKAGE
from hpctrain.base.process import SystemRunner
from hpctrain.launch.slurm_job.job_script import direct_command, directives, render_job
from hpctrain.launch.submission import preview
from hpctrain.node import run as node_run
from hpctrain.records.run.run import Run
from hpctrain.runs.folder import create_run_folder
from hpctrain.slurm.commands import client_environment

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "job.sh"


def run(**cluster: object) -> Run:
    return slurm_run(**{"nodes": "3-4", **cluster})


def neutral(text: str) -> str:
    """The script without what differs from machine to machine."""
    for own, any_one in ((sys.executable, "/usr/bin/python3"), (str(PACKAGE), "/lib/hpctrain"), (__version__, "0.0.0")):
        text = text.replace(own, any_one)
    return text


def test_the_script_is_the_golden_one() -> None:
    asked = run(
        partition="gpu", account="my project", qos="normal", time="1:30:00", device="cuda", devices_per_node=4,
        constraint="a100|h100", setup=["module load cuda", "source ~/venv/bin/activate"], sbatch=["--mem=0"],
    )  # fmt: skip
    text = neutral(preview(asked, Path("/shared/runs/gpt 1")))
    assert text == GOLDEN.read_text()


EVERY_KEY = {
    "nodes": "3", "groups": [{"constraint": "a100", "nodes": 2}, {"constraint": "v100&big", "nodes": 1}],
    "reservation": "course", "device": "cuda", "devices_per_node": 4, "gpu_type": "tesla", "after": ["7", "9"],
    "after_end": "any", "mail": {"user": "anna@example.org"}, "internet": False, "sbatch": ["--cpus-per-task=8"],
}  # fmt: skip


def test_the_script_of_a_job_with_nodes_of_several_kinds_is_the_golden_one() -> None:
    tracked = Run.from_json({**run(**EVERY_KEY).to_json(), "tracking": {"trackers": ["tensorboard"]}})
    text = neutral(preview(tracked, Path("/shared/it's/run")))
    assert text == GOLDEN.with_name("job_kinds.sh").read_text()


@pytest.mark.requires("shellcheck")
def test_the_scripts_are_shellcheck_clean() -> None:
    """Not told: what a person sources in `setup` is not here (SC1090); apt has placeholders like variables (SC2016)."""
    root = GOLDEN.parents[2]
    tools = [path for path in root.glob("tools/*") if path.is_file() and not path.suffix]
    scripts = [*root.glob("slurm/*.sbatch"), *GOLDEN.parent.glob("*.sh"), *tools, root / ".ci" / "run"]
    argv = ["shellcheck", "--exclude=SC1090,SC2016", *map(str, scripts)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # What is around each task is a script in quotes.
    task = GOLDEN.read_text().partition("\ntask='")[2].partition("'\n")[0]
    assert "keep_job" in task
    argv = ["shellcheck", "--shell=bash", "-"]
    done = subprocess.run(argv, input=task, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nothing_of_the_submitters_environment_is_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may carry a password: it reaches the job as sbatch hands on its environment, not in a file."""
    monkeypatch.setenv("https_proxy", "http://anna:secret@proxy:3128")
    assert "secret" not in preview(run(internet=False), Path("/shared/run"))
    assert client_environment(os.environ)["https_proxy"] == "http://anna:secret@proxy:3128"


def test_the_script_of_a_job_submitted_by_hand_is_the_golden_one() -> None:
    asked = run(device="cuda", devices_per_node=4, setup=["module load cuda"], constraint="a100")
    folder = Path("/shared/runs/gpt 1")
    text = neutral(render_job(asked, folder, direct_command(asked, folder), by_hand=True))
    assert text == GOLDEN.with_name("own_job.sh").read_text()


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
        (["--constraint=a100"], "found --constraint; write cluster.constraint"),
        (["--dependency=afterok:7"], "write cluster.after"),
        (["--mail-user=anna"], "write cluster.mail"),
        (["--clusters=all"], "--clusters is set by hpctrain"),
        (["--export=NONE"], r"set yours in cluster\.setup"),
        (["-N 2"], "write it as a long option"),
        (["--comment=x --nodes=9"], "sbatch would read more than one option"),
        (["--requ"], "--requ is an abbreviation; write the whole name: --requeue"),
        (["--nod=9"], "abbreviation; write the whole name: --nodefile, --nodelist, --nodes"),
        (["--cluster=all"], "--cluster is set by hpctrain"),
        (["--comment=a\n#SBATCH --nodes=9"], "line break"),
    ],
)
def test_options_that_would_break_the_recovery_are_refused(options: list[str], text: str) -> None:
    with pytest.raises(InputError, match=text):
        directives(run(sbatch=options), Path("/shared/run"))


def test_a_line_break_in_a_key_is_refused() -> None:
    with pytest.raises(InputError, match=r"--account: .* line break"):
        directives(run(account="a\n#SBATCH --nodes=9"), Path("/shared/run"))


@pytest.mark.parametrize("name", ["a\nscancel --me", "a\x1b[2J", "a\u2028b", "a\tb"])
def test_a_run_folder_whose_path_is_more_than_one_line_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"control character .* rename the folder"):
        preview(run(), tmp_path / name)
    with pytest.raises(InputError, match=r"control character .* rename the folder"):
        create_run_folder(tmp_path / name, run(), None, None, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_control_character_in_setup_is_refused() -> None:
    with pytest.raises(InputError, match=r"cluster\.setup: .* control character \\x1b"):
        render_job(run(setup=["echo \x1b[2J"]), Path("/shared/run"), "true")
    assert "\techo a" in render_job(run(setup=["\techo a"]), Path("/shared/run"), "true")


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


def test_the_notice_before_the_time_limit_is_the_run_files() -> None:
    assert "--signal=USR2@120" in directives(run(), Path("/shared/run"))
    assert "--signal=USR2@30" in directives(run(save_notice_s=30), Path("/shared/run"))


def test_a_step_names_the_gpus_that_came_with_the_nodes() -> None:
    unnamed = "${SLURM_GPUS_ON_NODE:+--gpus-per-node=$SLURM_GPUS_ON_NODE --gpu-bind=none}"
    assert unnamed in render_job(run(), Path("/shared/run"), "true")
    assert unnamed not in render_job(run(devices_per_node=2), Path("/shared/run"), "true")
    assert "gpu" not in render_job(run(device="cpu"), Path("/shared/run"), "true")


def test_only_a_job_of_its_own_goes_on_as_another() -> None:
    def last_line(run: Run, **how: bool) -> str:
        return render_job(run, Path("/shared/run"), "true", **how).partition("hpctrain.node end")[2]

    assert "--again new_job >&2" in last_line(run())
    assert "--again same_job >&2" in last_line(run_with(recovery={"requeue": "same_job"}))
    # Slurm has the person's script, not job.sh: only its own id leads back to it.
    assert "--again same_job >&2" in last_line(run(), by_hand=True)
    assert "--again" not in last_line(run(), submitted=False)


def test_a_job_with_successors_does_not_come_back_itself() -> None:
    assert "--requeue" in directives(run(), Path("/shared/run"))
    chained = directives(run_with(recovery={"successors": 2}), Path("/shared/run"))
    assert "--no-requeue" in chained
    assert "--requeue" not in chained


def run_with(**keys: object) -> Run:
    return Run.from_json({**run().to_json(), **keys})


FAKE_SRUN = """#!/bin/bash
trap 'echo USR2 >> {folder}/told; exit 75' USR2
echo "$SLURM_GPUS" "$@" >> {folder}/srun.argv
for _ in $(seq 100); do sleep 0.1; done
"""
FAKE_SCONTROL = """#!/bin/bash
tr , '\\n' <<< "$3"
"""
FAKE_PYTHON = """#!/bin/bash
[ "$3" = begin ] && echo 0 || echo "$@" > {folder}/end.argv
"""


@pytest.mark.parametrize("how", ["signal", "cancel"])
def test_in_an_allocation_a_request_to_stop_reaches_the_agents(tmp_path: Path, monkeypatch, how: str) -> None:
    for name, text in (("srun", FAKE_SRUN), ("python", FAKE_PYTHON), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    script = tmp_path / "job.sh"
    script.write_text(render_job(run(), tmp_path, "true", submitted=False))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "16", "SLURM_GPUS": "8"}
    argv = tmp_path / "srun.argv"
    process = SystemRunner().start(["bash", str(script)], env=env)
    try:
        deadline = time.monotonic() + 60
        while not (argv.exists() and argv.read_text().count("\n") == 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        if how == "signal":
            process.terminate()
        else:
            (tmp_path / "cancelled").touch()
        assert process.wait(600) == 0
    finally:
        process.kill()
    assert (tmp_path / "told").read_text() == "USR2\nUSR2\n"
    # One srun a node, none of which asks for the GPUs of all nodes.
    words = " --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --nodelist="
    each = [f"{words}{node} --output=" for node in "ab"]
    lines = sorted(argv.read_text().splitlines())
    assert [line[: len(start)] for line, start in zip(lines, each, strict=True)] == each
    assert (tmp_path / "end.argv").read_text().endswith("--code 75\n")


RUNNING_SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
echo "srun: error: it said so" >&2
exec "$@"
"""
NODE = """#!/bin/bash
# The task is this too: `python TASK`. A module's verb stands behind start.py and the module.
case "$2:$3" in
  hpctrain.node:begin) mkdir -p {folder}/left {folder}/logs/0; echo 0 ;;
  hpctrain.node:*) echo "$3" >> {folder}/verbs; echo "$@" > {folder}/"$3".argv ;;
  *) {task} ;;
esac
"""


@pytest.mark.parametrize(
    ("task", "code", "verbs"),
    [
        ("exit 0", 0, ["end"]),
        ("exit 75", 75, ["end"]),
        # The run is finished, and this node is to end the job of a script that was lost.
        ("echo gpu1 > {folder}/left/0.closer; exit 0", 0, ["close", "end"]),
        ("echo gpu2 > {folder}/left/0.closer; exit 0", 0, ["end"]),
        # The attempt is over, and this one is to see to what follows.
        ("echo gpu1 > {folder}/left/0.closer; exit 75", 75, ["close", "end"]),
        # A notice goes to every process of the step: what is around the task waits for the task's own end.
        ("trap 'exit 75' USR2; kill -USR2 $PPID; sleep 0.3; kill -USR2 $$", 75, ["end"]),
        # Where cgroups track processes, only the shell around the task gets it.
        (
            "trap 'exit 75' USR2; sleep 0.5; kill -USR2 $PPID; for _ in {1..99}; do sleep 0.1; done; exit 1",
            75,
            ["end"],
        ),
        (
            "trap 'exit 75' TERM; sleep 0.5; kill -TERM $PPID; for _ in {1..99}; do sleep 0.1; done; exit 1",
            75,
            ["end"],
        ),
    ],
)
def test_what_is_around_a_task_gives_back_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, code: int, verbs: list[str]
) -> None:
    node = NODE.replace("{task}", task).replace("{folder}", str(tmp_path))
    for name, text in (("srun", RUNNING_SRUN), ("python", node), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    script = tmp_path / "job.sh"
    script.write_text(render_job(run(), tmp_path, f"{tmp_path / 'python'} the-task"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "gpu1", "SLURMD_NODENAME": "gpu1"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (tmp_path / "verbs").read_text().split() == verbs, done.stderr
    # `end` here passes no code on; what it was called with counts.
    assert done.returncode == 0
    assert (tmp_path / "logs" / "0" / "srun.txt").read_text() == "srun: error: it said so\n"
    assert "srun: error: it said so" in done.stderr
    assert f"--code {code}" in (tmp_path / "end.argv").read_text()


LOSING_SRUN = """#!/bin/bash
echo "${@:1:8}" >> {folder}/srun.argv
case "$*" in
  *--nodelist=b\\ --overlap*) echo "srun: error: Unable to create step" >&2; exit 1 ;;
  *--nodelist=b*) sleep 0.5; echo "srun: error: Node failure on b" >&2; exit 0 ;;
  *--nodelist=c*) sleep 0.5; exit 3 ;;
  *) until grep -q overlap {folder}/srun.argv; do sleep 0.1; done; sleep 0.5; exit 75 ;;
esac
"""


def test_a_node_that_came_back_gets_its_task_again_and_the_highest_code_of_the_others_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NODE.replace("{task}", "exit 9").replace("{folder}", str(tmp_path))
    programs = {"srun": LOSING_SRUN.replace("{folder}", str(tmp_path)), "python": node, "scontrol": FAKE_SCONTROL}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    script = tmp_path / "job.sh"
    script.write_text(render_job(run(), tmp_path, "true"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a,b,c", "SLURMD_NODENAME": "a"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=600, check=False)
    starts = [line.partition("--nodelist=")[2].partition(" --output")[0] for line in (tmp_path / "srun.argv").open()]
    assert sorted(starts[:3]) == ["a", "b", "c"]
    assert starts[3:] == ["b --overlap"], "once: Slurm had refused it"
    assert "--code 75" in (tmp_path / "end.argv").read_text(), done.stderr
    assert (tmp_path / "left" / "0.seen").exists()


def test_a_task_takes_the_nodes_of_its_attempt_from_the_job_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has one node."""
    monkeypatch.setenv("HPCTRAIN_NODES", "n[1-3]")
    assert node_run._parse(["--folder", "/shared/run", "--attempt", "0"]).nodes == "n[1-3]"


def test_a_job_outlives_its_nodes_where_a_task_can_end_it() -> None:
    assert "--no-kill" in directives(run(), Path("/shared/run"))
    pyxis = run_with(container={"image": "/images/train.sqsh", "runtime": "pyxis"})
    assert "--no-kill" not in directives(pyxis, Path("/shared/run"))
    assert "keep_job" not in render_job(pyxis, Path("/shared/run"), "true").partition("\nstart() {")[0]


def test_trackers_run_beside_the_training_and_end_before_the_job() -> None:
    plain = render_job(run(), Path("/shared/run"), "true")
    tracked = render_job(run_with(tracking={"trackers": ["tensorboard"]}), Path("/shared/run"), "true")
    assert "tracker" not in plain
    begin, end = tracked.index(" track /shared/run --follow)"), tracked.index('kill -TERM "$tracker"')
    assert tracked.index('do start "$node"; done') < begin < tracked.index("# Takes note of each srun that has ended")
    assert begin < end < tracked.index(" end --folder")
