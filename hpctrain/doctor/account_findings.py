"""What the Python environment and the home folder of an account mean for a run. Pure: from facts to findings."""

from __future__ import annotations

from functools import partial

from hpctrain.base.requirements import pip_install
from hpctrain.base.units import format_bytes
from hpctrain.doctor.facts import DoctorFinding, EnvironmentFacts, EnvironmentKind, HomeFacts, StoredPart, UnfitPackage
from hpctrain.runs.file_system import IN_MEMORY, is_shared

NEWEST_PYTHON = (3, 13)
"""The newest Python with which hpctrain's tests ran."""
ROOM_BYTES = 10 * 2**30
"""Bytes that should be free for an environment with torch for GPUs and its caches: the environment alone takes 5.4 GB
(torch 2.12 for CUDA 13)."""
ROOM_FILES = 100_000
"""Files that should be free: the environment with torch for GPUs has 44,000 files and folders."""
STORAGE_PAGE = "`hpctrain docs tutorial/1-storage` says how to put environment and caches elsewhere"
_KINDS: dict[EnvironmentKind, str] = {
    "venv": "a virtual environment",
    "conda": "a conda environment",
    "pixi": "a pixi environment",
    "image": "in a container image",
    "system": "no environment of your own",
}
_python = partial(DoctorFinding, "Python")
_file = partial(DoctorFinding, "files")


def environment_findings(environment: EnvironmentFacts, elsewhere: bool) -> list[DoctorFinding]:
    """Return findings about the Python that a job starts from.

    Args:
        elsewhere: whether jobs run on other machines, which have to see the environment.
    """
    parts = environment.parts if elsewhere and environment.kind != "image" else ()
    return [
        _environment(environment),
        *(_seen_by_nodes(part) for part in parts),
        *_packages(environment.unfit),
    ]


def _environment(environment: EnvironmentFacts) -> DoctorFinding:
    """Return the finding about the Python environment that a job starts from. Level `note` if it is the system's
    Python, or has a newer Python than the tests of hpctrain ran with; else `ok`.
    """
    value = f"{_KINDS[environment.kind]}: {environment.parts[0].path}, Python {environment.python}"
    if environment.kind == "system":
        words = "nodes may have another version of the system's Python, and an update of it breaks hpctrain"
        todo = "install hpctrain into a virtual environment: `hpctrain docs tutorial/2-environment`"
        return _python("environment", "note", value, words, todo)
    version = tuple(map(int, environment.python.split(".")[:2]))
    if version > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        return _python("environment", "note", value, f"hpctrain was tried with Python up to {newest}")
    return _python("environment", "ok", value, "a job starts from it, too")


def _seen_by_nodes(part: StoredPart) -> DoctorFinding:
    """Return the finding that says whether other nodes see a part of the Python environment. Level `problem` if the
    part lies in memory, `note` on a file system that is probably not shared, else `ok`.
    """
    value, todo = f"{part.path}: {part.kind or 'type unknown'}", "install it in a folder that all nodes share"
    if part.kind in IN_MEMORY:
        words = "it is in this machine's memory: no node could start hpctrain"
        return _python(part.name, "problem", value, words, todo)
    if is_shared(part.kind):
        return _python(
            part.name, "ok", value, "on a shared file system; that all nodes mount it is seen in the job only"
        )
    words = "as a rule one machine's own disk; on a node that does not see it, no job starts"
    return _python(part.name, "note", value, words, todo)


def _packages(unfit: tuple[UnfitPackage, ...]) -> list[DoctorFinding]:
    """Return a finding for each unfit package: level `problem` for a package that every run needs, `note` for one that
    only an extra needs. Without unfit packages, return one finding of level `ok`.
    """
    if not unfit:
        return [_python("packages", "ok", "as hpctrain needs them", "by the versions that it accepts")]
    return [
        _python(
            package.name,
            "problem" if package.needed else "note",
            package.version or "not installed",
            f"hpctrain works with {package.accepted or 'any version'}",
            pip_install(package.name),
        )
        for package in unfit
    ]


def home_finding(home: HomeFacts) -> DoctorFinding:
    """Return the finding about the free space in the home folder, by its quota if there is one, and the caches that lie
    in it. Level `note` if a Python environment with torch for GPUs would not fit, else `ok`.
    """
    room_bytes, room_files, value = home.free_bytes, home.free_files, f"{home.path}: {home.kind or 'type unknown'}"
    if home.quota:
        quota = home.quota
        of_files = f" of {quota.limit_files:,}" if quota.limit_files else ""
        of_bytes = f" of {format_bytes(quota.limit_bytes)}" if quota.limit_bytes else ""
        value += f", {format_bytes(quota.used_bytes)}{of_bytes} and {quota.used_files:,}{of_files} files used (quota)"
        room_bytes = _least(room_bytes, quota.limit_bytes, quota.used_bytes)
        room_files = _least(room_files, quota.limit_files, quota.used_files)
    elif room_bytes is not None:
        value += f", {format_bytes(room_bytes)} free"
    if (room_bytes is not None and room_bytes < ROOM_BYTES) or (room_files is not None and room_files < ROOM_FILES):
        caches = f"; caches in it: {', '.join(home.caches)}" if home.caches else ""
        words = f"little room: an environment with torch for GPUs has 44,000 files of 5.4 GB{caches}"
        return _file("home", "note", value, words, STORAGE_PAGE)
    if home.quota:
        return _file("home", "ok", value, "room for an environment and its caches")
    words = (
        "on the whole file system; your quota may be less, which your site's command tells (lfs quota, mmlsquota, …)"
    )
    return _file("home", "ok", value, words)


def _least(free: int | None, limit: int | None, used: int) -> int | None:
    """Return how much may still be written, in the unit of the arguments: the smaller of `free` and what is left of
    `limit`; None if neither is known.
    """
    rests = [rest for rest in (free, None if limit is None else max(0, limit - used)) if rest is not None]
    return min(rests, default=None)
