"""`hpctrain bench compression`: its three tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_seconds

Say = Callable[[str], None]
ROWS_FILE = "steps.jsonl"


def steps(
    lab: Path | None, nodes: Sequence[int], rates: Sequence[str], methods: Sequence[str], count: int,
    preset: str | None, output: Path | None, people: Console, say: Say,
) -> dict[str, Any]:  # fmt: skip
    """Measure steps of each method, on a lab that is brought up for it or on this machine; print the table."""
    from hpctrain.base.process import SystemRunner
    from hpctrain.bench.compression import lab_place, local_place, measure
    from hpctrain.bench.compression_methods import METHODS
    from hpctrain.bench.compression_scene import Settings, as_json
    from hpctrain.bench.row_store import RowStore

    settings = Settings(steps=count) if preset is None else Settings(steps=count, spec=_spec(preset))
    store = RowStore(output / ROWS_FILE if output else None, as_json(settings))
    chosen = _known(methods, METHODS) or list(METHODS)
    if lab is None:
        places = [local_place(number) for number in nodes or (4,)]
        record = measure(SystemRunner(), places, chosen, settings, store, say)
    else:
        with _lab(lab, say) as (machine, layout):
            have = len(layout.names)
            sizes = list(nodes) or [number for number in (4, 8) if number <= have] or [have]
            if max(sizes) > have:
                raise InputError(f"--nodes {max(sizes)}: {lab} has {have}; give at most that many")
            # One at a time: a place shapes its links when it is entered.
            opened = (lab_place(machine, layout, number, rate) for number in sizes for rate in rates)
            record = measure(machine.runner, opened, chosen, settings, store, say)
    people.print(_steps_table(record["rows"]))
    return record


def check_rates(rates: Sequence[str]) -> None:
    """Refuse what is no rate before anything is built."""
    from hpctrain.records.lab_spec import rate_bits_per_s

    for rate in rates:
        try:
            rate_bits_per_s(rate)
        except ValueError as error:
            raise click.BadParameter(f"found {rate!r}; {error}", param_hint="--rate") from None


@contextlib.contextmanager
def _lab(path: Path, say: Say) -> Iterator[tuple[Any, Any]]:
    """A lab of that spec while the bench runs."""
    from hpctrain.lab.down import clear
    from hpctrain.lab.layout import Layout, state_folder
    from hpctrain.lab.machine import one_at_a_time, this_machine
    from hpctrain.lab.requirements import require_programs, require_root
    from hpctrain.lab.up import bring_up
    from hpctrain.records.lab_spec import read_lab_spec

    machine = this_machine()
    layout = Layout(state_folder(os.environ), read_lab_spec(path))
    require_root(machine, "up")
    with one_at_a_time():
        require_programs()
        bring_up(machine, layout, False, tell=say)
        try:
            yield machine, layout
        finally:
            clear(machine, layout.folder)


def _spec(preset: str) -> Any:
    from hpctrain.bench.scene import BYTES_VOCABULARY
    from hpctrain.records.model_spec import PRESETS

    if preset not in PRESETS:
        raise click.BadParameter(f"found {preset!r}; there are: {', '.join(PRESETS)}", param_hint="--preset")
    return PRESETS[preset].model_copy(update={"vocab": BYTES_VOCABULARY})


def _known(methods: Sequence[str], table: dict[str, Any]) -> list[str]:
    for name in methods:
        if name not in table:
            raise click.BadParameter(f"found {name!r}; there are: {', '.join(table)}", param_hint="--method")
    return list(dict.fromkeys(methods))


def _steps_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "link", "nodes", "method", "step", "quartiles", "CPU", "own core", "bytes/param", "counted", "loss",
        title="A step of each method: medians; CPU and bytes for each node", title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["link"], str(row["nodes"]), row["method"], format_seconds(row["step_time_s"]),
            f"{format_seconds(row['step_time_low_s'])} to {format_seconds(row['step_time_high_s'])}",
            format_seconds(row["cpu_s"]),
            format_seconds(row["own_core_s"]) if "own_core_s" in row else "",
            f"{row['bytes_per_parameter']:.3f}",
            f"{row['counted_bytes_per_parameter']:.3f}" if "counted_bytes_per_parameter" in row else "",
            f"{row['loss']:.4f}" if "loss" in row else "not finite",
        )  # fmt: skip
    return table
