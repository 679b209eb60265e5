"""provenance.json of a new run folder: what was submitted, from which image, and no variable by its value."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import CommandError
from hpctrain.base.process import CommandResult, SystemRunner
from hpctrain.launch.preflight.provenance import image_identity, write_provenance
from hpctrain.records.history.provenance import RunProvenance
from hpctrain.records.run.run import Container, Run

RUN = {"steps": 1, "model": {"preset": "tiny-1m"}, "data": {"train": ["/data"]}, "batch": {"global": 8}}


class Answers(SystemRunner):
    """Answers by the name of the program; a program without an answer does not exist."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self._answers = answers

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        name = Path(argv[0]).name
        if name not in self._answers:
            raise CommandError(f"{name}: not found")
        return CommandResult(tuple(argv), 0, self._answers[name], "")


def test_a_run_records_the_versions_it_was_submitted_with(tmp_path: Path) -> None:
    run = Run.from_json({**RUN, "cluster": {"kind": "slurm"}})
    environ = {"LOADEDMODULES": "gcc/12.2", "HF_TOKEN": "hf_secret", "SLURM_CONF": "/etc/slurm.conf"}
    write_provenance(run, tmp_path, Answers({"sbatch": "slurm 24.11.5\n"}), SystemClock(), environ)
    written = RunProvenance.read(tmp_path / "provenance.json")
    assert written.slurm == "24.11.5"
    assert written.software.modules == ["gcc/12.2"]
    assert written.image is None
    assert "torch" in {package.name for package in written.packages}
    for file in ("provenance.json", "requirements.lock"):
        text = (tmp_path / file).read_text()
        assert "secret" not in text
        assert "slurm.conf" not in text


def test_of_a_run_with_an_image_the_packages_inside_count(tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    image.write_bytes(b"x")
    run = Run.from_json({**RUN, "container": {"image": str(image)}})
    write_provenance(run, tmp_path, Answers({}), SystemClock(), {})
    assert not (tmp_path / "requirements.lock").exists()
    written = RunProvenance.read(tmp_path / "provenance.json").image
    assert written is not None
    assert (written.path, written.size_bytes, written.id, written.labels) == (str(image), 1, None, {})


def test_a_sif_file_is_known_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apptainer = tmp_path / "apptainer"
    apptainer.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    build, image = uuid.uuid4(), tmp_path / "a.sif"
    launch = b"#!/usr/bin/env run-singularity\n"
    image.write_bytes(struct.pack("<32s10s3s3s16s", launch, b"SIF_MAGIC", b"01", b"02", build.bytes) + b"\0" * 64)
    labels = '{"data": {"attributes": {"labels": {"org.example.version": "3"}}}}'
    identity = image_identity(Container(image=str(image), runtime="apptainer"), Answers({"apptainer": labels}))
    assert identity.id == str(build)
    assert identity.labels == {"org.example.version": "3"}
    assert image_identity(Container(image="docker://a/b", runtime="pyxis"), Answers({})).size_bytes is None
