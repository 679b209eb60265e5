"""Fills in the Slurm options that a job of `hpctrain probe` or `hpctrain selfcheck` was not given, from the site
profile or from variables such as SBATCH_ACCOUNT."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import click

from hpctrain.base.process import SystemRunner
from hpctrain.launch.preflight.site import VARIABLES, site_defaults
from hpctrain.launch.probe import ProbeJob
from hpctrain.slurm.commands import Slurm


def with_site_defaults(job: ProbeJob, runner: SystemRunner) -> ProbeJob:
    """Return the job with defaults for the options that were not given; print each default and its source on stderr.

    A default is from the profile of this cluster in site.yaml, otherwise from a variable such as SBATCH_ACCOUNT. Inside
    an allocation the job is unchanged, because no job is submitted.
    """
    if "SLURM_JOB_ID" in os.environ:
        return job
    defaults = site_defaults(None, Slurm(runner), os.environ)
    cluster = defaults.values.get("cluster", {}) if defaults else {}
    values = {key: cluster.get(key) or os.environ.get(name) for key, name in VARIABLES.items()}
    taken: dict[str, Any] = {key: value for key, value in values.items() if value and getattr(job, key) is None}
    for key, value in taken.items():
        source = f"profile '{defaults.profile}' of {defaults.path}" if defaults and key in cluster else VARIABLES[key]
        click.echo(f"{key}: {value}, from {source}", err=True)
    return replace(job, **taken)
