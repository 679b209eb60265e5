"""`--recover SECONDS`: the time that a recovery takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hpctrain.cli.options.named_numbers import FiniteNumber
from hpctrain.planner.simulate.goodput import DEFAULT_RECOVERY_S


def recover_option(purpose: str = "") -> Callable[..., Any]:
    """Return the option `--recover SECONDS`; `purpose` says what it is for."""
    return click.option(
        "--recover",
        type=FiniteNumber(0),
        default=DEFAULT_RECOVERY_S,
        metavar="SECONDS",
        help=f"From a failure to the next step, in place{purpose} (default: 5 s until a silent node is missed, and "
        "what four local nodes took).",
    )
