"""Files of the machine that are visible inside an image: hpctrain, the run's files, and those that the run file
names."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import hpctrain
from hpctrain.base.errors import InputError
from hpctrain.records.run.run import Run

LIBRARY = "/opt/hpctrain/lib"
"""Folder inside the image, on Python's module path, with the code of the hpctrain that submits. A new version of
hpctrain needs no new image."""
ENVIRONMENT = "/opt/hpctrain/environment"
"""Folder inside the image with the packages of the submitting hpctrain. Only images with environment `bind` use it."""
_ALWAYS_MOUNTED = (Path("/tmp"), Path("/var/tmp"))
_TEMPORARY = ("SLURM_TMPDIR", "TMPDIR")


@dataclass(frozen=True)
class Bind:
    """A file or folder of the machine, and its path inside the image."""

    source: str
    target: str
    read_only: bool = False

    def text(self) -> str:
        """Return SOURCE:TARGET[:ro], as Apptainer, SingularityCE and pyxis read it."""
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


def parse_bind(text: str) -> Bind:
    """Return the bind written as SOURCE[:TARGET[:ro|rw]].

    Raises:
        InputError: the text is not of this form.
    """
    parts = text.split(":")
    source, target = parts[0], parts[1] if len(parts) > 1 else parts[0]
    mode = parts[2] if len(parts) > 2 else "rw"
    if len(parts) > 3 or mode not in ("ro", "rw") or "," in text:
        raise InputError(f"container.binds: found {text!r}; write SOURCE[:TARGET[:ro]], without commas")
    if not source.startswith("/") or not target.startswith("/"):
        raise InputError(f"container.binds: found {text!r}; both paths start at /")
    return Bind(source, target, mode == "ro")


def check_binds(binds: Iterable[str]) -> None:
    """Check that the sources of binds in the run file exist; without this check, the runtime would report it in the
    job.

    Raises:
        InputError: a bind is badly written, or its source does not exist.
    """
    for text in binds:
        bind = parse_bind(text)
        if not os.path.lexists(bind.source):
            raise InputError(
                f"container.binds: {bind.source}: there is no such file or folder; make it, or leave it out"
            )


def program_binds() -> list[Bind]:
    """Return the binds of hpctrain's own code and of the packages beside it."""
    package = Path(hpctrain.__file__).resolve().parent
    packages = Path(sysconfig.get_path("purelib"))
    return [
        Bind(str(package), f"{LIBRARY}/{package.name}", read_only=True),
        Bind(str(packages), ENVIRONMENT, read_only=True),
    ]


def run_binds(run: Run, folder: Path, environ: Mapping[str, str]) -> list[Bind]:
    """Return all binds that the run needs, each with equal paths inside and outside; those of the run file come last.

    Args:
        folder: the run folder, absolute.
        environ: environment of the node, which names its temporary folders.

    Raises:
        InputError: a path cannot be passed to a container runtime.
    """
    data = run.data
    files = [*data.train_folders, *data.valid_folders, *filter(None, [data.tokenizer, run.model.hf, run.secrets_file])]
    binds = program_binds() + [bind for path in files for bind in _same(Path(path), read_only=True)]
    binds += _same(folder)
    for path in _temporary(run, environ):
        binds += _same(path)
    binds += [parse_bind(text) for text in (run.container.binds if run.container else [])]
    for bind in binds:
        if "," in bind.text() or ":" in bind.source + bind.target:
            raise InputError(f"container: {bind.source}: a path with a comma or colon cannot be bound; rename it")
    return list({bind.target: bind for bind in binds}.values())


def _same(path: Path, read_only: bool = False) -> list[Bind]:
    """Return binds that keep the path: of the path, and if it contains a symbolic link, of the link's target."""
    real = path.resolve()
    return [Bind(str(item), str(item), read_only) for item in dict.fromkeys((real, path))]


def _temporary(run: Run, environ: Mapping[str, str]) -> list[Path]:
    """Return the node's existing temporary folders, without those that the runtime mounts by default."""
    named = [environ.get(name) for name in _TEMPORARY]
    named += [Template(run.data.stage_folder).safe_substitute(environ) if run.data.stage_folder else None]
    paths = [Path(name) for name in named if name and name.startswith("/")]
    return [
        path
        for path in dict.fromkeys(paths)
        if path.is_dir() and not any(path == seen or seen in path.parents for seen in _ALWAYS_MOUNTED)
    ]
