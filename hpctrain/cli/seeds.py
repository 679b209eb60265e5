"""`--seeds 0-4`: the same run once for each seed, each as a run and a job of its own."""

from __future__ import annotations

import click
from ClusterShell.RangeSet import RangeSet, RangeSetException

from hpctrain.base.errors import InputError
from hpctrain.records.run import Run

MOST = 200
NAME_LENGTH = 64
"""As the run file's `name` allows."""

option = click.option("--seeds", metavar="SET", help="One run for each of these seeds: 0-4, or 1,2,5, or 0-20/5.")


def parse_seeds(text: str) -> list[int]:
    """'0-2,7' -> [0, 1, 2, 7].

    Raises:
        InputError: no such set, or more than 200 seeds.
    """
    try:
        seeds = sorted(int(seed) for seed in RangeSet(text))
    except (RangeSetException, ValueError):
        raise InputError(f"--seeds: found {text!r}; allowed: numbers and ranges, as 0-4 or 1,2,5 or 0-20/5") from None
    if not 1 <= len(seeds) <= MOST:
        raise InputError(f"--seeds: found {len(seeds)} seeds; allowed: 1 to {MOST}, each is a job of its own")
    return seeds


def with_seed(run: Run, seed: int) -> Run:
    """The run with another seed, which its name tells.

    Raises:
        InputError: the name becomes too long.
    """
    name = f"{run.name}-seed{seed}"
    if len(name) > NAME_LENGTH:
        raise InputError(f"--seeds: {name} is longer than {NAME_LENGTH} characters; give the run a shorter name")
    return run.model_copy(update={"name": name, "seed": seed})
