"""Copies a run's corpora to the node's own disk before the workers start, if the run file says `data.stage: node`. If a
corpus cannot be copied, the workers read it in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.agent.event_log import EventLog
from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError
from hpctrain.base.units import format_bytes, format_seconds
from hpctrain.corpus.read.node_cache import VARIABLE, cache_on_node, size_bytes
from hpctrain.corpus.read.tokens import read_index
from hpctrain.records.run.data import Data

STAGING_LIMIT_MIN_S = 60.0
"""Seconds that copying may take in addition to the time at the slowest rate."""
STAGING_RATE_MIN_BYTES_PER_S = 50e6
"""Slowest rate of copying: from a slower shared file system, the node reads the data in place."""


def staging_limit_s(data: Data) -> float:
    """Return the seconds that a node may take to copy all corpora of the run; 0 if the run file asks for no copies. The
    other nodes wait so much longer for the node to join.

    Raises:
        InputError: a corpus folder is missing, or its index is missing or damaged.
    """
    if data.stage == "none":
        return 0.0
    return (
        STAGING_LIMIT_MIN_S
        + sum(size_bytes(read_index(folder)) for folder in _folders(data)) / STAGING_RATE_MIN_BYTES_PER_S
    )


def stage_data(
    data: Data, event_log: EventLog, environ: Mapping[str, str], clock: Clock, stop: Callable[[], str | None]
) -> dict[str, str]:
    """Copy the corpus folders to this node's disk. Return the environment variable that tells the workers of them, as
    {name: value}; the value is a JSON object {corpus folder: path of its copy}. Return {} if the run file does not ask
    for copies.

    While this process runs, no other process removes the copies. A folder that cannot be copied is read in place; an
    event says why.

    Args:
        stop: returns who asked this node to stop, or None; a request to stop ends the copying.

    Raises:
        InputError: as of `staging_limit_s`.
    """
    copies: dict[str, str] = {}
    if data.stage == "none":
        return copies
    base, deadline = stage_base(data, environ), clock.now() + staging_limit_s(data)

    def give_up() -> str | None:
        if stop():
            return "asked to stop"
        return "it took too long" if clock.now() > deadline else None

    for folder in _folders(data):
        start = clock.now()
        try:
            copy = cache_on_node(Path(folder), base, clock, give_up)
        except HpctrainError as error:
            text = f"{folder} is read where it is: no copy in {base}: {error}"
            event_log.write("data_not_staged", -1, text, folder=folder)
            continue
        copies[folder] = str(copy.path)
        seconds = clock.now() - start
        size = format_bytes(copy.copied_bytes)
        how = f"copied, {size} in {format_seconds(seconds)}" if copy.copied_bytes else "there already"
        data_of = {"folder": folder, "copy": str(copy.path), "size_bytes": copy.copied_bytes, "seconds": seconds}
        event_log.write("data_staged", -1, f"{folder} is at {copy.path}: {how}", **data_of)
    return {VARIABLE: json.dumps(copies)}


def stage_base(data: Data, environ: Mapping[str, str]) -> Path:
    """Return the folder for copies on the node's own disk: `data.stage_folder`, else SLURM_TMPDIR, else TMPDIR, else
    /tmp."""
    given = data.stage_folder or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or "/tmp"
    return Path(os.path.expandvars(given)).expanduser()


def _folders(data: Data) -> list[str]:
    return list(dict.fromkeys([*data.train_folders, *data.valid_folders]))
