"""Parses the options of sbatch in `cluster.sbatch`, whose items are one option each, into name and value."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

_ITEM = re.compile(
    r"""--(?P<name>[A-Za-z][\w-]*)(?:(?:=|[ \t]+(?!-))(?P<value>[^\s"'\\#]*|"[^"\\]*"|'[^'\\]*'))?[ \t]*""", re.ASCII
)
"""One option with at most one value. sbatch splits a #SBATCH line into words: blanks end a word, # begins a comment, a
backslash escapes the next character (_get_argument in its opt.c). A value with any of these must be in quotes."""

NAMES = (
    "account", "acctg-freq", "array", "autocomplete", "batch", "bb", "bbf", "begin", "chdir", "cluster",
    "cluster-constraint", "clusters", "comment", "consolidate-segments", "constraint", "container", "container-id",
    "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline",
    "delay-boot", "dependency", "distribution", "error", "exclude", "exclusive", "export", "export-file",
    "extra-node-info", "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "help", "hint", "hold", "ignore-pbs", "input", "job-name",
    "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mincpus", "network", "nice", "no-kill", "no-requeue", "nodefile", "nodelist", "nodes", "ntasks",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "oom-kill-step", "open-mode", "output",
    "overcommit", "oversubscribe", "parsable", "partition", "power", "prefer", "priority", "profile", "propagate",
    "qos", "quiet", "reboot", "requeue", "reservation", "resv-ports", "segment", "share", "signal", "sockets-per-node",
    "spread-job", "stepmgr", "switches", "test-only", "thread-spec", "threads-per-core", "time", "time-min", "tmp",
    "tres-bind", "tres-per-task", "uid", "usage", "use-min-nodes", "verbose", "version", "wait", "wait-all-nodes",
    "wckey", "wrap",
)  # fmt: skip
"""sbatch's long options in Slurm 22.05 to 24.11; sites add their own (SPANK plugins)."""


def parse_sbatch_option(item: str) -> tuple[str, str]:
    """Return the name without dashes and the value ('' for none) of an option written as `--name`, `--name=value` or
    `--name value`.

    Raises:
        ValueError: sbatch would read the item differently, or the name is abbreviated; the message says what to do.
    """
    if not item.startswith("--"):
        raise ValueError("write it as a long option, --name=value")
    parts = _ITEM.fullmatch(item)
    if parts is None:
        raise ValueError(
            "sbatch would read more than one option, or a part of one, in it; give one option an item, and put a value "
            "that has blanks or # in quotes: --name='a value'"
        )
    name, value = parts["name"], parts["value"] or ""
    longer = [known for known in NAMES if known.startswith(name)]
    if longer and name not in NAMES:
        raise ValueError(f"--{name} is an abbreviation; write the whole name: {', '.join(f'--{a}' for a in longer)}")
    return name, value[1:-1] if value.startswith(('"', "'")) else value


def parse_sbatch_options(items: Iterable[str]) -> dict[str, str]:
    """Return {option name without dashes: value}; items for which `parse_sbatch_option` raises an error are left
    out."""
    options = {}
    for item in items:
        with contextlib.suppress(ValueError):
            name, value = parse_sbatch_option(item)
            options[name] = value
    return options
