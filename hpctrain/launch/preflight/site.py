"""Finds the settings that one cluster adds to every run of a user (from a profile of site.yaml, then from variables
such as SBATCH_ACCOUNT), and warns of training on a login node."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpctrain.base.errors import CommandError, InputError
from hpctrain.launch.local import local_environment
from hpctrain.records.run.cluster import Site, read_site, site_file
from hpctrain.records.run.run import Run, missing_keys
from hpctrain.slurm.commands import Slurm

VARIABLES = {"partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT", "qos": "SBATCH_QOS"}
"""The variable that sbatch would read for each key of `cluster`. hpctrain runs sbatch without these
variables, so it takes their values itself, for keys that the run file leaves out."""


@dataclass(frozen=True)
class SiteDefaults:
    """Values that a profile of site.yaml gives for keys that a run file leaves out."""

    profile: str
    """Name of the profile."""
    path: Path
    """Path of site.yaml."""
    values: dict[str, Any]
    """The values, keyed and nested as in a run file."""

    def words(self, run_file: Path, overrides: tuple[str, ...]) -> list[str]:
        """Return one line that names the keys that a run takes from this site profile; [] if it takes none.

        Args:
            overrides: settings on the command line, written key=value; a key that they or the run file set is
                not taken from the profile.

        Raises:
            InputError: an override is no 'key.path=value'.
            FileError: the run file cannot be read.
        """
        taken = missing_keys(run_file, overrides, self.values)
        return [f"from profile '{self.profile}' of {self.path}: {', '.join(taken)}"] if taken else []


def site_defaults(asked: str | None, slurm: Slurm, environ: Mapping[str, str]) -> SiteDefaults | None:
    """Return the values of one profile of site.yaml: the profile named `asked`, or if `asked` is None the first one
    that matches this host or its Slurm cluster. None if `asked` is None and no profile matches or there is no
    site.yaml.

    Raises:
        FileError: site.yaml is wrong.
        InputError: there is no profile named `asked`, or no site.yaml that could have it.
    """
    path = site_file(environ)
    site = read_site(path)
    if site is None:
        if asked is not None:
            raise InputError(f"--site {asked}: there is no {path}; `hpctrain docs submitting` shows one")
        return None
    if asked is not None and asked not in site.profiles:
        raise InputError(f"--site {asked}: no such profile in {path}; there are: {', '.join(site.profiles)}")
    name = asked or site.matching(_cluster_names(site, slurm))
    return None if name is None else SiteDefaults(name, path, site.profiles[name].defaults)


def _cluster_names(site: Site, slurm: Slurm) -> list[str]:
    """Return the names that a profile's key `match` is compared with: this host's name, in full and short, and before
    them the name of its Slurm cluster. The cluster's name is left out if no profile has `match` or Slurm does not
    answer."""
    host = platform.node()
    names = [host, host.partition(".")[0]]
    if all(not profile.match for profile in site.profiles.values()):
        return names
    try:
        return [slurm.config()["cluster"], *names]
    except CommandError:
        return names  # no Slurm here, or no answer: match by the host's names


def place_defaults(slurm: Slurm, environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return (value, source) for each key of `cluster` that a variable of sbatch (`VARIABLES`) sets, or the profile of
    site.yaml that matches this host or its Slurm cluster. If both set a key, the profile's value is taken.

    Raises:
        FileError: site.yaml is wrong.
    """
    values: dict[str, tuple[Any, str]] = {
        key: (environ[name], name) for key, name in VARIABLES.items() if environ.get(name)
    }
    defaults = site_defaults(None, slurm, environ)
    if defaults is not None:
        source = f"profile '{defaults.profile}' of {defaults.path}"
        values |= {key: (value, source) for key, value in defaults.values["cluster"].items() if value is not None}
    return values


def with_sbatch_variables(run: Run, environ: Mapping[str, str]) -> tuple[Run, list[str]]:
    """Return the run with the values of sbatch's variables (`VARIABLES`) for keys that the run file leaves out, and
    lines that name these values."""
    open_keys = [key for key in VARIABLES if getattr(run.cluster, key) is None]
    taken = {key: environ[VARIABLES[key]] for key in open_keys if environ.get(VARIABLES[key])}
    lines = [f"cluster.{key}: {value}, from {VARIABLES[key]}" for key, value in taken.items()]
    return run.model_copy(update={"cluster": run.cluster.model_copy(update=taken)}), lines


FEW_CORES = 4
"""Number of cores up to which a run counts as usual work on a login node, such as compiling."""


def check_not_queued_here(slurm: Slurm, here: str) -> None:
    """Check that this machine has no Slurm, before `hpctrain submit` starts a run with `cluster.kind: local`: on a
    machine with Slurm, a user of `submit` expects a job in the queue.

    Args:
        here: what to do to train on this machine, for the message.

    Raises:
        InputError: this machine has Slurm.
    """
    if slurm.available():
        raise InputError(
            "cluster.kind: found local on a machine with Slurm: nothing would be queued, and this machine would train; "
            f"for a job write kind: slurm, or add --set cluster.kind=slurm; to train on this machine, {here}"
        )


def login_node_words(count: int, slurm: Slurm, environ: Mapping[str, str]) -> list[str]:
    """Return a warning, as lines, if a run of `count` virtual nodes would use more than FEW_CORES cores of a login
    node; else [].

    This machine counts as a login node if it has Slurm's commands, this process is in no job, no slurmd is seen to run,
    and Slurm lists no node with this host's name.
    """
    threads = local_environment(count, environ)["OMP_NUM_THREADS"]
    cores = min(len(os.sched_getaffinity(0)), count * int(threads) if threads.isdigit() else count)
    if cores <= FEW_CORES or environ.get("SLURM_JOB_ID") or not slurm.available() or _is_node(slurm):
        return []
    return [
        f"this looks like a login node, and the run keeps {cores} of its cores busy, which most sites forbid; train as "
        "a job: `hpctrain submit RUN.YAML --set cluster.kind=slurm`, or take fewer cores: OMP_NUM_THREADS=1"
    ]


def _is_node(slurm: Slurm) -> bool:
    """Return whether this machine is a compute node; False if only Slurm could tell and does not answer."""
    if any(process.info["name"] == "slurmd" for process in psutil.process_iter(["name"])):
        return True
    try:
        # Where a user sees no processes of others (hidepid), Slurm's list of nodes still has this host.
        return platform.node().partition(".")[0] in {node.name for node in slurm.nodes()}
    except CommandError:
        return False
