"""How an image is entered: argv, environment and binds, for each kind of machine and runtime."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain.base.errors import InputError
from hpctrain.container.entry import (
    ENVIRONMENT,
    LIBRARY,
    PROGRAM,
    Bind,
    Host,
    Runtime,
    check_binds,
    entry_command,
    entry_environment,
    find_runtime,
    parse_bind,
    pyxis_command,
    pyxis_options,
    run_binds,
    this_host,
    with_surviving_mount,
)
from hpctrain.records.run.run import Container, Run

USER = Host(is_root=False, may_raise_limits=False, has_nvidia=False)
APPTAINER = Runtime("apptainer", "/usr/bin/apptainer")


def run_with(**more: object) -> Run:
    value = {"name": "r", "steps": 1, "model": {"preset": "tiny-1m"}, "batch": {"global": 1}}
    return Run.from_json({**value, "data": {"train": ["/data"]}, "container": {"image": "/i.sif"}, **more})


def test_a_user_enters_plainly() -> None:
    argv = entry_command(APPTAINER, USER, Container(image="/i.sif"), [Bind("/a", "/b", True)], ["python3", "x"])
    assert argv == ["/usr/bin/apptainer", "--silent", "exec", "--bind", "/a:/b:ro", "/i.sif", "python3", "x"]


@pytest.mark.parametrize(
    ("host", "nv", "expected"),
    [
        (Host(True, False, False), "auto", ["--userns"]),
        (Host(True, True, True), "auto", ["--nv"]),
        (Host(False, False, True), "no", []),
        (USER, "yes", ["--nv"]),
    ],
)
def test_the_machine_decides_the_options(host: Host, nv: str, expected: list[str]) -> None:
    argv = entry_command(APPTAINER, host, Container(image="/i.sif", nv=nv), [], ["true"])
    assert argv[3:-2] == expected


def test_the_environment_of_the_image_s_python_is_its_own() -> None:
    container = Container(image="/i.sif", env={"PYTHONPATH": "/mine", "CACHE": "$SCRATCH/hf", "A": "a,b c"})
    environ = {"PYTHONPATH": "/host", "PYTHONHOME": "/h", "VIRTUAL_ENV": "/v", "SCRATCH": "/s", "HOME": "/root"}
    env = entry_environment(container, environ, "APPTAINERENV_", Path("/run/code"))
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & env.keys()
    assert env["HOME"] == "/root"
    assert env["APPTAINERENV_PYTHONPATH"] == f"/run/code:{LIBRARY}:/mine"
    assert env["APPTAINERENV_CACHE"] == "/s/hf"
    assert env["APPTAINERENV_A"] == "a,b c"
    assert env["APPTAINERENV_HPCTRAIN_IMAGE"] == "/i.sif"


def test_pyxis_starts_the_task_and_a_shell_fills_in_names() -> None:
    container = Container(image="nvidia+pytorch:25.01", runtime="pyxis", env={"CACHE": "$SCRATCH/`x` $(y)"})
    assert pyxis_options(container, [Bind("/a", "/a"), Bind("/b", "/c", True)]) == [
        "--container-image=nvidia+pytorch:25.01", "--container-mounts=/a:/a,/b:/c:ro", "--container-mount-home",
    ]  # fmt: skip
    text = pyxis_command(container, ["sh", "-c", 'echo "$CACHE|$PYTHONPATH|$HPCTRAIN_IMAGE"'])
    done = subprocess.run(["sh", "-c", text], env={"SCRATCH": "/s", "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert done.stdout.decode() == f"/s/`x` $(y)|{LIBRARY}|nvidia+pytorch:25.01\n"


def test_a_run_sees_its_files_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    scratch = Path("/var/lib")  # a folder of a machine that is no usual temporary one
    run = run_with(
        data={"train": [str(tmp_path / "link")]}, container={"image": "/i.sif", "binds": ["/etc:/etc/host:ro"]}
    )
    found = run_binds(run, tmp_path, {"SLURM_TMPDIR": str(scratch), "TMPDIR": "/tmp/x"})
    texts = [bind.text() for bind in found]
    assert f"{tmp_path / 'real'}:{tmp_path / 'real'}:ro" in texts
    assert f"{tmp_path / 'link'}:{tmp_path / 'link'}:ro" in texts
    assert f"{tmp_path}:{tmp_path}" in texts
    assert f"{scratch}:{scratch}" in texts
    assert texts[-1] == "/etc:/etc/host:ro"
    assert not any(text.startswith("/tmp/x") for text in texts)
    assert {f"{LIBRARY}/hpctrain", ENVIRONMENT} <= {bind.target for bind in found}


def test_a_path_that_no_runtime_can_bind_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="comma or colon"):
        run_binds(run_with(data={"train": ["/da,ta"]}), tmp_path, {})


@pytest.mark.parametrize("text", ["a:b", "/a:b", "/a:/b:rx", "/a:/b:ro:x", "/a,/b"])
def test_a_badly_written_bind_is_said(text: str) -> None:
    with pytest.raises(InputError, match=r"container\.binds: found"):
        parse_bind(text)


def test_a_bind_that_is_not_there_is_said_before_the_job(tmp_path: Path) -> None:
    check_binds([f"{tmp_path}:/x", "/etc"])
    with pytest.raises(InputError, match="there is no such file or folder"):
        check_binds([f"{tmp_path}/none"])


def test_apptainer_comes_before_singularity() -> None:
    assert find_runtime("auto", lambda name: f"/bin/{name}").name == "apptainer"
    assert find_runtime("auto", lambda name: name if name == "singularity" else None).prefix == "SINGULARITYENV_"
    with pytest.raises(InputError, match="no apptainer on the path"):
        find_runtime("apptainer", lambda name: None)


@pytest.mark.parametrize(("held", "needs"), [("000001fffeffffff", True), ("000001ffffffffff", False)])
def test_root_without_a_capability_needs_a_namespace(tmp_path: Path, held: str, needs: bool) -> None:
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{held}\n")
    host = this_host(tmp_path / "status", tmp_path / "none")
    assert Host(True, host.may_raise_limits, host.has_nvidia).needs_user_namespace is needs
    assert not Host(False, host.may_raise_limits, False).needs_user_namespace


def test_the_image_s_file_system_ignores_what_slurm_sends_to_every_process(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text('#!/bin/sh\nkill -TERM $$; kill -USR2 $$; echo alive "$@"\n')
    real.chmod(0o755)
    env = with_surviving_mount(
        {"PATH": "/usr/bin"}, tmp_path / "a b", lambda name: str(real) if name == PROGRAM else None, True
    )
    assert env["PATH"] == f"{tmp_path / 'a b'}:/usr/bin"
    # As Apptainer starts it: with no environment at all.
    done = subprocess.run([str(tmp_path / "a b" / PROGRAM), "x y"], env={}, capture_output=True, text=True)
    assert done.stdout == "alive x y\n"
    assert with_surviving_mount({"PATH": "p"}, tmp_path / "c", lambda name: None, True) == {"PATH": "p"}
