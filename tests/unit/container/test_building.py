"""Building with a stand-in for Apptainer: what is kept, what is refused, and that nothing half-built is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import HpctrainError, InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.container.build import INPUTS, Builder, BuildResult, build, build_options
from hpctrain.container.entry import Host, Runtime
from hpctrain.container.recipe import Base, Environment, ImageRecipe, Kind, inputs_sha256

RECIPE = ImageRecipe(Base("cuda"), "install", ["torch==2.13.0"], "3.11", "/site-packages", [])
STAND_IN = """#!/bin/sh
# An image is a file with its labels in JSON.
if [ "$2" = inspect ]; then cat "$4"; exit; fi
for last; do definition=$target; target=$last; done
target=$definition definition=$last
echo "+ a trace"; echo "INFO:    Starting build..."
{body}
"""
GOOD = """label=$(grep org.hpctrain.inputs "$definition" | sed 's/.* //')
printf '{"data": {"attributes": {"labels": {"org.hpctrain.inputs": "%s"}}}}' "$label" >"$target" """


def run(tmp_path: Path, body: str, said: list[str] | None = None, force: bool = False) -> BuildResult:
    program = tmp_path / "apptainer"
    program.write_text(STAND_IN.replace("{body}", body))
    program.chmod(0o755)
    runtime = Runtime("apptainer", str(program))
    say = (said if said is not None else []).append
    image = tmp_path / "images" / "train.sif"
    builder = Builder(runtime, [], os.environ, SystemRunner(), SystemClock(), say)
    return build(RECIPE, image, "", builder, force)


def test_an_image_is_built_once_for_the_same_inputs(tmp_path: Path) -> None:
    said: list[str] = []
    assert run(tmp_path, GOOD, said).fresh
    assert said == ["INFO:    Starting build..."]
    assert not run(tmp_path, "exit 1").fresh
    labels = json.loads((tmp_path / "images" / "train.sif").read_text())["data"]["attributes"]["labels"]
    assert labels == {INPUTS: inputs_sha256(RECIPE)}
    assert run(tmp_path, GOOD, force=True).fresh


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo half >$target; echo 'FATAL:   no room'; exit 255", "build ended with 255: FATAL:   no room"),
        ("echo done", "build ended with 0: done"),
        ('echo \'{"data": {"attributes": {"labels": {}}}}\' >$target', "does not carry the label"),
    ],
)
def test_a_failed_build_leaves_what_was_there(tmp_path: Path, body: str, said: str) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "train.sif").write_text("of other inputs")
    with pytest.raises(HpctrainError, match=said):
        run(tmp_path, body)
    assert [(path.name, path.read_text()) for path in images.iterdir()] == [("train.sif", "of other inputs")]


USER = Host(is_root=False, may_raise_limits=False, has_nvidia=False)


@pytest.mark.parametrize(
    ("host", "kind", "environment", "expected"),
    [
        (USER, "cuda", "install", ["--fakeroot"]),
        (Host(True, False, False), "cuda", "install", ["--fakeroot"]),
        (Host(True, True, False), "cuda", "install", []),
        (USER, "cpu-small", "bind", ["--fakeroot", "--bind", "/site-packages:/opt/hpctrain/environment:ro"]),
    ],
)
def test_who_builds_decides_how(host: Host, kind: Kind, environment: Environment, expected: list[str]) -> None:
    recipe = ImageRecipe(Base(kind), environment, [], "3.11", "/site-packages", [])
    options = build_options(host, True, Runtime("singularity", "s"), recipe, remote=False)
    assert options == expected


def test_apptainer_compresses_with_zstd() -> None:
    options = build_options(USER, True, Runtime("apptainer", "a"), RECIPE, remote=True)
    assert options == ["--remote", "--mksquashfs-args", "-comp zstd -Xcompression-level 1"]


def test_who_may_not_build_is_told_what_else_there_is() -> None:
    runtime = Runtime("apptainer", "a")
    with pytest.raises(RefusedError, match="add --remote"):
        build_options(USER, False, runtime, RECIPE, remote=False)
    small = ImageRecipe(Base("cpu-small"), "bind", [], "3.11", "/p", [])
    with pytest.raises(InputError, match="--remote: only for"):
        build_options(USER, False, runtime, small, remote=True)
