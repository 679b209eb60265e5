"""`hpctrain bench probe`: the probe's bandwidth compared with iperf3's, on links of the lab whose rate is known.

Both measure the same pair of nodes in the same direction, in turns and without other traffic. The error compares the
medians of the two.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import end_process
from hpctrain.bench.probe.lab_probe import probe_lab_nodes
from hpctrain.bench.record import make_record
from hpctrain.lab.faults import shaped
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.records.topology.link import LinkFigures

PORT = 5201
"""Default port of iperf3. It is free, because each node has a network namespace."""
CONNECT_S = 10.0


@dataclass(frozen=True)
class RateSettings:
    """Link rates and number of repeats."""

    rates: tuple[str, ...] = ("50mbit", "200mbit", "1gbit")
    """Rates that the links are shaped to."""
    repeats: int = 3
    iperf3_s: int = 4
    """Seconds that iperf3 sends; iperf3 leaves the first second out of its result."""


@dataclass(frozen=True)
class RateRow:
    """Results for one link rate."""

    case: str
    ours_bytes_per_s: float
    iperf3_bytes_per_s: float
    error_pct: float
    """Error of the probe in percent of iperf3's rate; below 0, the probe's rate is lower."""
    ours_spread_pct: float
    """Largest minus smallest of the probe's repeats, in percent of the median."""
    iperf3_spread_pct: float
    cpu_contended: int
    """Repeats in which the probe reports that a processor limited the rate."""


def measure(
    machine: Machine, layout: LabLayout, settings: RateSettings, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Shape the links of the lab's first two nodes to each rate, measure, and restore their rates.

    Raises:
        InputError: iperf3 is not installed, or the lab has only one node.
        CommandError: a command failed.
    """
    if shutil.which("iperf3") is None:
        raise InputError("bench probe: iperf3 is not on the path; install it (Debian and Ubuntu: iperf3)")
    if len(layout.names) < 2:
        raise InputError("bench probe: the lab has one node; start one with `hpctrain lab up --nodes 2 --replace`")
    pair = (layout.names[0], layout.names[1])
    rows = []
    for rate in settings.rates:
        progress(f"{rate}: {pair[0]} to {pair[1]}")
        with shaped(machine, layout, pair, rate):
            rows.append(_row(machine, layout, pair, rate, settings))
    return make_record("probe", rows, asdict(settings))


def compare_rates(case: str, ours: Sequence[LinkFigures], iperf3: Sequence[float]) -> RateRow:
    """Return one row from the repeats.

    Raises:
        ValueError: one side has no figures.
    """
    rates = [figures.isolated_bytes_per_s for figures in ours if figures.isolated_bytes_per_s]
    if not rates or not iperf3:
        raise ValueError(f"{case}: nothing was measured")
    rate, theirs = statistics.median(rates), statistics.median(iperf3)
    return RateRow(
        case=case,
        ours_bytes_per_s=rate,
        iperf3_bytes_per_s=theirs,
        error_pct=100 * (rate / theirs - 1),
        ours_spread_pct=100 * (max(rates) - min(rates)) / rate,
        iperf3_spread_pct=100 * (max(iperf3) - min(iperf3)) / theirs,
        cpu_contended=sum(figures.cpu_contended is True for figures in ours),
    )


def _row(machine: Machine, layout: LabLayout, pair: tuple[str, str], rate: str, settings: RateSettings) -> RateRow:
    ours, theirs = [], []
    for _ in range(settings.repeats):
        ours.append(probe_lab_nodes(machine, layout, pair)[0].fabric.links[0].ab)
        theirs.append(_iperf3(machine, layout, pair, settings.iperf3_s))
    return compare_rates(rate, ours, theirs)


def _iperf3(machine: Machine, layout: LabLayout, pair: tuple[str, str], seconds: int) -> float:
    """Return the bytes per second that iperf3's receiver measures."""
    source, target = pair
    addr = layout.address(target)
    listen = _inside(layout, target, ["iperf3", "-s", "-1", "-B", addr, "-p", str(PORT)])
    # The client receives the server's output as well, and stdout of the bench is for its record: drop the server's.
    server = machine.runner.start(listen, log=Path(os.devnull))
    words = ["iperf3", "-c", addr, "-p", str(PORT), "-t", str(seconds), "-O", "1", "-J"]
    client = _inside(layout, source, words)
    try:
        deadline = machine.clock.now() + CONNECT_S
        while (received := received_bytes_per_s((done := machine.try_run(client)).stdout)) is None:
            if machine.clock.now() >= deadline:
                message = " ".join((done.stderr or done.stdout).split())
                raise CommandError(f"bench probe: iperf3 from {source} to {target} gave no rate: {message}")
            machine.clock.sleep(0.2)  # the iperf3 server has not started yet
        return received
    finally:
        end_process(server)


def received_bytes_per_s(text: str) -> float | None:
    """The receiver's rate in the output of `iperf3 -J`; None where it is missing, as after a failed connection, because
    iperf3 then exits with 0."""
    try:
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8
    except (ValueError, KeyError, TypeError):
        return None


def _inside(layout: LabLayout, node: str, argv: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", layout.namespace(node), *argv]
