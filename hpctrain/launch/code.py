"""A copy of the person's code in the run folder, so that a queued job runs what was submitted."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_json
from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import Runner
from hpctrain.base.units import format_bytes

FOLDER = "code"
LEFT_OUT = (".git", ".venv", "venv", "__pycache__", "node_modules", "runs", "*.pyc", ".mypy_cache", ".pytest_cache")
LARGEST_BYTES = 256 * 2**20
"""More than this is data that lies beside the code, and does not belong into every run folder."""


def snapshot_code(source: Path, run_folder: Path, runner: Runner) -> None:
    """Copy `source` to run_folder/code, with its git state in code.json.

    Raises:
        InputError: there is no such folder, or it is too large to be code.
        StorageError: it cannot be written.
    """
    if not source.is_dir():
        raise InputError(f"code: {source}: no such folder; name the folder that holds your packages")
    size = sum(path.stat().st_size for path in _files(source))
    if size > LARGEST_BYTES:
        raise InputError(
            f"code: {source}: holds {format_bytes(size)}, allowed: {format_bytes(LARGEST_BYTES)}; name a folder with "
            "code alone"
        )
    with storage_errors(run_folder / FOLDER):
        shutil.copytree(source, run_folder / FOLDER, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    write_json(run_folder / "code.json", {"source": str(source), **git_state(source, runner)})


def git_state(source: Path, runner: Runner) -> dict[str, object]:
    """{commit, dirty} of a git checkout; nothing where there is none."""
    try:
        commit = runner.run(["git", "-C", str(source), "rev-parse", "HEAD"], timeout_s=20)
        if commit.code != 0:
            return {}
        status = runner.run(["git", "-C", str(source), "status", "--porcelain", "--", "."], timeout_s=60)
    except CommandError:
        return {}
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def _files(source: Path) -> list[Path]:
    ignored = set(LEFT_OUT)
    return [
        path
        for path in source.rglob("*")
        if path.is_file() and not path.is_symlink() and not ignored & set(path.relative_to(source).parts)
    ]
