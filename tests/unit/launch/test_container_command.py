"""A run's commands in its image: the job's script and steps, and what is refused before anything starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpctrain.base.errors import InputError
from hpctrain.base.module_argv import program
from hpctrain.container.entry import LIBRARY, Host
from hpctrain.launch.container_command import check_container, container_command
from hpctrain.launch.slurm_job.job_script import direct_command
from hpctrain.launch.submission import preview
from hpctrain.node.enter import IMAGE_TOOLS_FOLDER, command_in_container
from hpctrain.records.run.run import Container, Run
from hpctrain.runs.folder import render_run

FOLDER = Path("/shared/runs/r")
INSIDE = f"{LIBRARY}/hpctrain/base/start.py"


def run_in(image: str | None, **more: object) -> Run:
    container = {"container": {"image": image, **more}} if image else {}
    value = {"name": "r", "steps": 1, "model": {"preset": "tiny-1m"}, "batch": {"global": 1}, **container}
    return Run.from_json({**value, "data": {"train": ["/data"]}, "cluster": {"kind": "slurm", "device": "cpu"}})


def test_the_step_enters_the_image_and_the_script_stays_outside() -> None:
    text = preview(run_in("/i.sif"), FOLDER)
    node = shlex.join(program("hpctrain.node"))
    enter = f"{node} enter --folder {FOLDER} -- python3 -u {INSIDE} submitit.core._submit"
    assert enter in text
    assert f"$({node} begin" in text
    outside = shlex.join(program("submitit.core._submit", flags=["-u"]))
    assert text.replace(enter, outside) == preview(run_in(None), FOLDER)


def test_pyxis_is_told_by_srun_s_options() -> None:
    text = preview(run_in("nvidia+pytorch:25.01", runtime="pyxis"), FOLDER)
    line = next(line for line in text.splitlines() if "--container-image=nvidia+pytorch:25.01" in line)
    assert f"{FOLDER}:{FOLDER}" in line
    assert f"python3 -u {INSIDE} submitit.core._submit" in line
    assert "node enter" not in text
    assert container_command(run_in("x", runtime="pyxis"), FOLDER, ["ls"]) == ["ls"]


def test_a_step_without_submitit_enters_too() -> None:
    text = direct_command(run_in("/i.sif"), FOLDER)
    assert text.endswith(f"-- python3 {INSIDE} hpctrain.node run --folder {FOLDER}")


def test_the_node_s_command_turns_into_the_runtime_s(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    host = Host(is_root=False, may_raise_limits=False, has_nvidia=True)
    (tmp_path / "run.yaml").write_text(render_run(run_in("/i.sif", env={"A": "$B"})))
    environ = {"B": "b", "PATH": "/p"}
    argv, env = command_in_container(tmp_path, ["x"], environ, host, lambda name: f"/bin/{name}", True)
    assert argv[0] == "/bin/apptainer"
    assert argv[-2:] == ["/i.sif", "x"]
    assert "--nv" in argv
    assert env["APPTAINERENV_A"] == "b"
    assert env["APPTAINERENV_PYTHONPATH"].startswith(f"{tmp_path}/code:")
    assert env["PATH"].startswith(str(tmp_path / IMAGE_TOOLS_FOLDER))
    (tmp_path / "run.yaml").write_text(render_run(run_in(None)))
    plain = command_in_container(tmp_path, ["x"], {"B": "b"}, host, lambda name: None, True)
    assert plain == (["x"], {"B": "b"})


def test_what_is_missing_is_said_before_the_job(tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    with pytest.raises(InputError, match=r"container\.image: .*there is no such file; build one"):
        check_container(Container(image=str(image)), local=False, which=lambda name: None)
    image.touch()
    check_container(Container(image=str(image)), local=False, which=lambda name: None)
    with pytest.raises(InputError, match="neither apptainer nor singularity"):
        check_container(Container(image=str(image)), local=True, which=lambda name: None)
    with pytest.raises(InputError, match=r"container\.runtime: found pyxis"):
        check_container(Container(image="x", runtime="pyxis"), local=True, which=lambda name: None)
