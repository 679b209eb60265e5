"""What sites tell people to export once for all their jobs: SBATCH_ACCOUNT and the like."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.records.run import Run

VARIABLES = {"partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT", "qos": "SBATCH_QOS"}
"""Key of `cluster` -> the variable that sbatch would read for it. The client's environment is cleaned of them."""


def with_exported(run: Run, environ: Mapping[str, str]) -> tuple[Run, list[str]]:
    """The run with those variables where its file says nothing, and what was taken, as lines for the person."""
    open_keys = [key for key in VARIABLES if getattr(run.cluster, key) is None]
    taken = {key: environ[VARIABLES[key]] for key in open_keys if environ.get(VARIABLES[key])}
    lines = [f"cluster.{key}: {value}, from {VARIABLES[key]}" for key, value in taken.items()]
    return run.model_copy(update={"cluster": run.cluster.model_copy(update=taken)}), lines
