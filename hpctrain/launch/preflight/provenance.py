"""Writes provenance.json and requirements.lock into a new run folder: what the run was submitted with."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import Clock, utc_text
from hpctrain.base.errors import CommandError, FileError, HpctrainError, InputError
from hpctrain.base.owned_files import read_owned
from hpctrain.base.process import Runner
from hpctrain.base.regular_file import open_regular
from hpctrain.container.build import labels_of
from hpctrain.container.entry import find_runtime
from hpctrain.records.history.provenance import (
    PROVENANCE_FILE,
    REQUIREMENTS_FILE,
    CodeState,
    ImageIdentity,
    InstalledPackage,
    RunProvenance,
    SoftwareVersions,
)
from hpctrain.records.run.run import Container, Run
from hpctrain.runs.environment import installed_packages, requirements_text, software_versions

_SIF_HEADER = struct.Struct("<32s10s3s3s16s")
"""Start of a .sif file: launch script, magic, version, architecture, id (Singularity Image Format, version 1)."""


@dataclass(frozen=True)
class SubmittedSoftware:
    """The software that a run is submitted with; the same for all runs of a sweep."""

    packages: list[InstalledPackage]
    versions: SoftwareVersions
    slurm: str | None
    """Version of Slurm; None: not asked, or not known."""


def submitted_software(runner: Runner, environ: Mapping[str, str], queued: bool) -> SubmittedSoftware:
    """Return the software of this process, and for a queued run Slurm's version. Takes about a tenth of a second."""
    packages = installed_packages()
    versions = software_versions(packages, environ, runner)
    return SubmittedSoftware(packages, versions, _slurm_version(runner) if queued else None)


def write_provenance(
    run: Run, folder: Path, runner: Runner, clock: Clock, environ: Mapping[str, str],
    software: SubmittedSoftware | None = None,
) -> None:  # fmt: skip
    """Write what the run is submitted with into its new run folder.

    A run with an image gets no requirements.lock here, because its packages are those inside the image: the first node
    of the first attempt writes it.

    Args:
        software: what `submitted_software` found before; None: it is called now.

    Raises:
        StorageError: the run folder cannot be written.
    """
    software = software or submitted_software(runner, environ, run.cluster.kind == "slurm")
    provenance = RunProvenance(
        created=utc_text(clock.wall()),
        software=software.versions,
        slurm=software.slurm,
        code=_code_state(folder),
        image=None if run.container is None else image_identity(run.container, runner),
        packages=software.packages,
    )
    provenance.write(folder / PROVENANCE_FILE)
    if run.container is None:
        write_text(folder / REQUIREMENTS_FILE, requirements_text(software.versions, software.packages))


def _slurm_version(runner: Runner) -> str | None:
    with contextlib.suppress(CommandError):
        done = runner.run(["sbatch", "--version"], timeout_s=20)
        words = done.stdout.split()  # slurm 24.11.5; on Debian slurm-wlm 22.05.8
        return words[-1][:64] if done.code == 0 and words else None
    return None


def _code_state(folder: Path) -> CodeState | None:
    with contextlib.suppress(FileNotFoundError):
        state = json.loads(read_owned(folder / "code.json"))
        return CodeState(commit=state["commit"], dirty=state["dirty"]) if "commit" in state else None
    return None


def image_identity(container: Container, runner: Runner) -> ImageIdentity:
    """Return what identifies the image of a run. What cannot be read is absent; for an image that pyxis fetches, that
    is all but its name.

    The id of a .sif file stands for its hash: hashing an image of 10 GB takes longer than the start of a run.
    """
    path = Path(container.image)
    try:
        status = path.stat()
    except OSError:
        return ImageIdentity(path=str(container.image))
    labels: dict[str, str] = {}
    with contextlib.suppress(HpctrainError, InputError):
        labels = labels_of(find_runtime(container.runtime, shutil.which), path, runner)
    return ImageIdentity(
        path=str(path), id=_sif_id(path), size_bytes=status.st_size, modified_s=status.st_mtime, labels=labels
    )


def _sif_id(path: Path) -> str | None:
    """Return the id in the header of a .sif file; None for any other file, or a folder."""
    try:
        descriptor = open_regular(os.path.realpath(path))
    except (OSError, FileError):
        return None
    try:
        header = os.pread(descriptor, _SIF_HEADER.size, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(header) < _SIF_HEADER.size:
        return None
    _, magic, _, _, identity = _SIF_HEADER.unpack(header)
    return str(uuid.UUID(bytes=identity)) if magic.rstrip(b"\0") == b"SIF_MAGIC" else None
