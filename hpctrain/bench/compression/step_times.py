"""`hpctrain bench compression`: cost of each method of gradient synchronisation in step time, CPU time and
bytes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.process import Runner
from hpctrain.bench.comparison import interval
from hpctrain.bench.compression.launch import (
    LATE,
    LaunchResult,
    LaunchSettings,
    LaunchSpec,
    Samples,
    as_json,
    run_scene,
)
from hpctrain.bench.compression.rank import CORPUS_FOLDER, LOOPBACK
from hpctrain.bench.record import RowStore, machine_and_versions
from hpctrain.corpus.input.sample_text import TextLocation, find_sample_text
from hpctrain.corpus.prepare.options import PrepareOptions
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.lab.faults import shaped
from hpctrain.lab.layout import NODE_INTERFACE, LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.spec import rate_bits_per_s
from hpctrain.records.plan.gradient_codec import IntraNode

TEXT_BYTES = 4_000_000
VALID_FRACTION = 0.02


@dataclass(frozen=True)
class MethodRow:
    """Result of one method on one link: step times, CPU time, bytes and loss. `step_time_low_s` and
    `step_time_high_s` are quartiles. `own_core_s` estimates a step on nodes that share no CPU core. `choice` and
    `planned_step_s` are the planner's, for the method auto only."""

    method: str
    link: str
    """Rate that the links were shaped to, as tc writes it, or 'loopback'."""
    nodes: int
    devices: int
    """Processes on each node."""
    step_time_s: float
    """Median over the measured steps; the time of a step is that of its slowest process."""
    step_time_low_s: float
    step_time_high_s: float
    """`step_time_low_s` and `step_time_high_s`: first and third quartile of the measured steps."""
    step_time_mean_s: float
    """Mean of the measured steps; it matters for methods whose steps take different times."""
    cpu_s: float
    """CPU seconds of a process in a step, mean over processes and steps."""
    bytes_per_parameter: float
    """Payload bytes that a node sent in a step (its interface's counter divided by `header_factor`), divided by the
    number of parameters; mean over steps and nodes.
    """
    counted_bytes_per_parameter: float | None
    """Payload bytes that a rank sent in a step, by the method's own count, divided by the number of parameters; None
    where the method does not count."""
    header_factor: float
    """Bytes that the interface sends for each byte of payload, because of packet headers; measured on this link."""
    own_core_s: float | None
    """Estimated seconds of a step on nodes that share no CPU core and overlap nothing: `cpu_s` plus the time of the
    interface's bytes at the link's rate. None on a loopback, which has no rate."""
    loss: float | None
    """Mean loss on validation text after the last step; None where it is infinite or NaN."""
    steps: int
    """Number of measured steps."""
    choice: str | None
    """The codec's mode that the method auto chose; None for other methods."""
    planned_step_s: dict[str, float] | None
    """Mode -> step time that the planner predicts for it, for the method auto, in the order in which the planner
    tries modes: none, bf16, int8, int4. None for other methods."""
    choice_intra_node: IntraNode | None = None
    """How the replicas of a node sum first, where the method auto chose sums by level; None: flat sums, or another
    method."""
    late_ratio: float | None = None
    """Median ratio of the step to that of the same method with late sums, over pairs of steps; None if the launch does
    not have it."""
    late_ratio_low: float | None = None
    late_ratio_high: float | None = None
    """Ends of the 90 % interval of `late_ratio`, by bootstrap over the pairs."""


@dataclass(frozen=True)
class LaunchSite:
    """Where the processes of a launch run: on this machine, or on the nodes of a lab with links of one rate."""

    link: str
    """Name of the kind of link in the results: 'loopback', or the rate as for tc, such as 1gbit."""
    interface: str
    """Network interface over which the processes send."""
    prefixes: tuple[tuple[str, ...], ...]
    """For each node the words before a command, which enter the namespace of the node; empty on this machine."""
    bits_per_s: float | None
    """Rate of the links; None on a loopback."""


@contextlib.contextmanager
def local_site(nodes: int) -> Iterator[LaunchSite]:
    """Yield a launch site: `nodes` processes on this machine, which send over its loopback interface."""
    yield LaunchSite("loopback", LOOPBACK, ((),) * nodes, None)


@contextlib.contextmanager
def lab_site(machine: Machine, layout: LabLayout, nodes: int, rate: str) -> Iterator[LaunchSite]:
    """Yield a launch site: the lab's first `nodes` nodes, whose links are shaped to `rate` until the context ends.

    Raises:
        ValueError: `rate` is not a rate of tc, or is below 8kbit.
        CommandError: a link cannot be shaped.
    """
    names = layout.names[:nodes]
    prefixes = tuple(("ip", "netns", "exec", layout.namespace(name)) for name in names)
    with shaped(machine, layout, names, rate):
        yield LaunchSite(rate, NODE_INTERFACE, prefixes, rate_bits_per_s(rate))


def make_text(folder: Path, limit_bytes: int = TEXT_BYTES, locations: Sequence[TextLocation] | None = None) -> None:
    """Write a corpus of the sample text: files that most machines with Python have, such as manual pages, as `hpctrain
    init` takes them too. Tokens are bytes.

    Args:
        limit_bytes: most bytes of text to take.
        locations: where the files lie; None: `default_text_locations()`.

    Raises:
        InputError: this machine has no file for the sample text, or the folder is not empty.
        StorageError: the folder cannot be written.
    """
    sample = find_sample_text(limit_bytes, locations)
    prepare(list(sample.files), folder, PrepareOptions(valid_fraction=VALID_FRACTION, limit_bytes=limit_bytes))


def measure(
    runner: Runner,
    places: Iterable[contextlib.AbstractContextManager[LaunchSite]],
    methods: Sequence[str],
    settings: LaunchSettings,
    store: RowStore,
    progress: Callable[[str], None],
    together: int | None = None,
    devices: int = 1,
) -> dict[str, Any]:
    """Measure on each site all methods that have no row in the store, store their rows, and return the record of the
    bench with all rows.

    Args:
        places: the sites, each opened when its turn comes and closed after it.
        progress: called with the methods, nodes and link of each launch before it begins.
        together: number of methods in one launch; their rows are stored when it ends. None: all of them.
        devices: processes on each node.

    Raises:
        InputError: this machine has no file for the sample text.
        CommandError: a process failed.
        StorageError: a row, or the sample text, cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        folder = Path(name)
        make_text(folder / CORPUS_FOLDER)
        for opened in places:
            with opened as place:
                nodes = len(place.prefixes)
                key = {"link": place.link, "nodes": nodes, "devices": devices}
                missing = [name for name in methods if store.find(method=name, **key) is None]
                size = together or max(1, len(missing))
                for launched in (missing[first : first + size] for first in range(0, len(missing), size)):
                    progress(f"{', '.join(launched)} on {nodes} nodes of {devices}, {place.link}")
                    for row in measure_site(runner, place, launched, settings, folder, devices):
                        store.add({key: value for key, value in asdict(row).items() if value is not None})
    return machine_and_versions("compression", as_json(settings)) | {"rows": store.rows}


def measure_site(
    runner: Runner,
    place: LaunchSite,
    methods: Sequence[str],
    settings: LaunchSettings,
    folder: Path,
    devices: int = 1,
) -> list[MethodRow]:
    """Measure the methods in turns in one launch on the site `place`; return a row for each.

    Args:
        folder: holds the corpus; the launch writes its files there.
        devices: processes on each node.

    Raises:
        CommandError: a process failed.
    """
    scene = LaunchSpec(len(place.prefixes), place.interface, tuple(methods), settings, devices)
    outcome = run_scene(runner, scene, folder, place.prefixes)
    rows = [_row(name, place, devices, outcome, outcome.samples[name]) for name in methods]
    return [_beside_late(row, outcome.samples) for row in rows]


def _beside_late(row: MethodRow, samples: Mapping[str, Samples]) -> MethodRow:
    """Return the row with the ratio to the steps of the same method with late sums, if the launch has them. Steps are
    paired in the order in which the methods took turns."""
    late = samples.get(f"{row.method}{LATE}")
    if late is None:
        return row
    ratios = np.array(samples[row.method].wall_s) / np.array(late.wall_s)
    low, high = interval(ratios)
    return replace(row, late_ratio=float(np.median(ratios)), late_ratio_low=low, late_ratio_high=high)


def _row(name: str, place: LaunchSite, devices: int, outcome: LaunchResult, samples: Samples) -> MethodRow:
    low, middle, high = np.percentile(samples.wall_s, [25, 50, 75])
    cpu_s, sent = float(np.mean(samples.cpu_s)), float(np.mean(samples.interface_bytes))
    return MethodRow(
        method=name,
        link=place.link,
        nodes=len(place.prefixes),
        devices=devices,
        step_time_s=float(middle),
        step_time_low_s=float(low),
        step_time_high_s=float(high),
        step_time_mean_s=float(np.mean(samples.wall_s)),
        cpu_s=cpu_s,
        bytes_per_parameter=sent / outcome.header_factor / outcome.parameters,
        counted_bytes_per_parameter=(
            None if samples.counted_bytes is None else samples.counted_bytes / outcome.parameters
        ),
        header_factor=outcome.header_factor,
        own_core_s=None if place.bits_per_s is None else cpu_s + 8 * sent / place.bits_per_s,
        loss=samples.loss,
        steps=len(samples.wall_s),
        choice=samples.choice,
        choice_intra_node=samples.choice_intra_node,
        planned_step_s=samples.planned_step_s,
    )
