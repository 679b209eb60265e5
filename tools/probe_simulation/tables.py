"""Runs the probe at sizes that no test machine has: the real coordinator, rounds and verdict on a simulated fabric.

Only the network, the clock and the coordinator's cost per message are simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpctrain.bench.record import machine_and_versions
from hpctrain.probe.faults.network_faults import network_faults
from hpctrain.probe.measure.figures import PairFigures
from hpctrain.probe.measure.outcome import ContentionRound, PairResult, ProbeOutcome
from hpctrain.probe.measure.settings import Mode, ProbeSettings
from hpctrain.probe.pair_selection.measurement_schedule import measurement_schedule, switch_tree
from hpctrain.probe.pair_selection.rounds import Round, oversubscription
from hpctrain.probe.pair_selection.switches import PriorSwitches
from hpctrain.probe.protocol.coordinator import Coordinator
from hpctrain.records.topology.link import Latency
from tools.probe_simulation.fabric import FabricFaults, FabricSpec, Ints, SimulatedFabric
from tools.probe_simulation.transport import Failures, SimulatedClock, SimulatedTransport

SLOW_20, SLOW_10 = 0.8, 0.9
"""Factors on the bandwidth of the two bad nodes of a run: one is 20 % slower, one 10 %."""


@dataclass(frozen=True)
class RuntimeRow:
    """How long one whole probe of a healthy fabric takes."""

    nodes: int
    mode: Mode
    gbit_per_s: float
    """Bandwidth of a node's port in Gb/s."""
    rounds: int
    """Number of rounds."""
    wall_s: float
    """Seconds of measuring the links, on the simulated clock."""
    overhead_s: float
    """Seconds of one round without transfers and size sweep: the coordinator's messages, connections and round
    trips."""
    backend_s: float
    """Seconds of measuring messages over the training backend, on the simulated clock."""
    told: bool = False
    """Whether Slurm declared the switches."""


@dataclass(frozen=True)
class HealthRow:
    """How right the verdicts of health probes are, over runs with different seeds, on a fabric with two bad nodes:
    one 20 % and one 10 % slower."""

    rounds: int
    """Rounds of a probe."""
    noise: float
    """Standard deviation of a measured bandwidth as a share of its value."""
    bursts: float
    """Share of the measurements that foreign traffic disturbs."""
    runs: int
    """Number of simulated probes."""
    false_positive: float
    """Share of the good nodes, over all runs, that were reported as slow."""
    found_20: float
    """Share of the runs in which the 20 % slower node was reported as slow."""
    found_10: float
    """Share of the runs in which the 10 % slower node was reported as slow."""


@dataclass(frozen=True)
class SwitchRow:
    """How well probes infer the leaf switches and their oversubscription, over runs with different seeds."""

    nodes: int
    mode: Mode
    hop_gap: float
    """Share of the latency below one leaf that each further switch level adds."""
    noise: float
    oversubscription: float
    """The true oversubscription of the leaves."""
    runs: int
    rounds: int
    """Median number of rounds."""
    f1_min: float
    """F1 score of 'these two nodes share a leaf' over all pairs (`pair_f1`), in the worst run."""
    ratio_error_max: float
    """Relative error of the inferred oversubscription, in the worst run."""


@dataclass(frozen=True)
class SimulationPlan:
    """What to simulate for the three tables: sizes, speeds, noise and numbers of runs."""

    sizes: Sequence[int] = (64, 256, 1000)
    """Numbers of nodes in the table of runtimes."""
    gbit_per_s: Sequence[float] = (10.0, 25.0)
    """Bandwidths of a node's port in the table of runtimes, in Gb/s."""
    runs: int = 1000
    """Simulated probes for each row of the table of health probes."""
    nodes: int = 64
    """Nodes of the fabric in the health probes."""
    rounds: Sequence[int] = (2, 5, 9, 15)
    """Numbers of rounds in the table of health probes."""
    noise: Sequence[tuple[float, float]] = ((0.03, 0.1), (0.05, 0.1))
    """(noise, bursts) in the table of health probes; each combination with `rounds` is a row."""
    switch_runs: int = 5
    """Simulated probes for each row of the table of switches."""


def simulate(plan: SimulationPlan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Simulate the probes of all three tables. Return the record: the settings, and the rows of `health`, `switches`,
    `runtime`.

    Args:
        tell: called with a text about each row as the work goes on.
    """
    record = machine_and_versions("probe-simulated", asdict(plan))
    health = [health_row(plan, *cell, tell) for cell in _cells(plan)]
    switches = list(_switch_rows(plan, tell))
    runtime = list(_runtime_rows(plan, tell))
    return {
        **record,
        "health": [asdict(row) for row in health],
        "switches": [asdict(row) for row in switches],
        "runtime": [asdict(row) for row in runtime],
    }


def simulated_probe(
    fabric: SimulatedFabric,
    settings: ProbeSettings,
    failures: Failures | None = None,
    switches: bool = False,
    prior: PriorSwitches | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    clock: SimulatedClock | None = None,
) -> ProbeOutcome:
    """Run a whole probe on a simulated fabric with the real coordinator, and return its outcome, whose times are those
    of the simulated clock.

    Args:
        failures: nodes that fail during the probe; None: none.
        switches: whether Slurm declares the switches above each node.
        prior: the switches of an earlier topology; None: there is none.
        progress: called with the phase, the rounds done and the number of rounds.
        clock: the clock of the simulation; None: a new one.
    """
    names = node_names(fabric.spec.nodes)
    clock = clock or SimulatedClock()
    transport = SimulatedTransport(fabric, names, clock, settings, failures, switches)
    return Coordinator(transport, names, clock, settings, progress, prior).run()


def node_names(count: int) -> list[str]:
    """Return the names of `count` nodes: n0000, n0001, …"""
    return [f"n{index:04d}" for index in range(count)]


def runtime_row(nodes: int, mode: Mode, gbit_per_s: float, told: bool = False) -> RuntimeRow:
    """Return how long one probe of a healthy fabric with 2:1 oversubscription takes, and the overhead of its rounds.

    Args:
        gbit_per_s: bandwidth of a node's port.
        told: whether Slurm declares the switches.
    """
    spec = FabricSpec(nodes, bytes_per_s=gbit_per_s * 1e9 / 8, oversubscription=(2.0, 1.0))
    clock, began = SimulatedClock(), dict[str, float]()
    done = simulated_probe(
        SimulatedFabric(spec), ProbeSettings(mode=mode, device="cpu"), switches=told, clock=clock,
        progress=lambda phase, *_: _note(began, phase, clock.time),
    )  # fmt: skip
    # The same probe without data to send: its time is the overhead.
    bare = ProbeSettings(mode=mode, device="none", bulk_bytes=1, bulk_bytes_max=1, bulk_s=0.0, ladder_bytes=())
    empty = simulated_probe(SimulatedFabric(spec), bare, switches=told)
    return RuntimeRow(
        nodes, mode, gbit_per_s, done.rounds_done,
        wall_s=round(began["devices"], 2),
        overhead_s=round(empty.wall_s / max(1, empty.rounds_done), 4),
        backend_s=round(clock.time - began["backend"], 2),
        told=told,
    )  # fmt: skip


def _note(began: dict[str, float], phase: str, now: float) -> None:
    began.setdefault(phase, now)


def health_row(
    plan: SimulationPlan, rounds: int, noise: float, bursts: float, tell: Callable[[str], None] = lambda _: None
) -> HealthRow:
    """Return how often health probes judge nodes rightly. Each run has another seed, other bad nodes and another
    schedule.

    Args:
        rounds: rounds of a probe.
        noise: standard deviation of a measured bandwidth as a share of its value.
        bursts: share of the measurements that foreign traffic disturbs.
        tell: called with a text about the row.
    """
    tell(f"health: {rounds} rounds, noise {noise:.0%}, bursts {bursts:.0%}, {plan.runs} runs")
    names = node_names(plan.nodes)
    wrong = slow_20 = slow_10 = 0
    for seed in range(plan.runs):
        bad_20, bad_10 = seed % plan.nodes, (seed + 1 + plan.nodes // 2) % plan.nodes
        shares = {bad_20: SLOW_20, bad_10: SLOW_10}
        spec = FabricSpec(plan.nodes, per_leaf=16, noise=noise, bursts=bursts)
        fabric = SimulatedFabric(spec, FabricFaults(sends=shares, receives=shares), seed)
        settings = ProbeSettings(mode="health", health_rounds=rounds, seed=seed, device="none")
        outcome = ProbeOutcome(list(names))
        play(outcome, fabric, settings)
        faults = network_faults(outcome, switch_tree(outcome, settings), settings)
        called = {fault.node for fault in faults if fault.node is not None}
        slow_20 += names[bad_20] in called
        slow_10 += names[bad_10] in called
        wrong += len(called - {names[bad_20], names[bad_10]})
    good = plan.runs * (plan.nodes - 2)
    return HealthRow(rounds, noise, bursts, plan.runs, wrong / good, slow_20 / plan.runs, slow_10 / plan.runs)


def play(outcome: ProbeOutcome, fabric: SimulatedFabric, settings: ProbeSettings) -> None:
    """Carry out the measurement schedule on the fabric without coordinator and clock, which saves time. The figures
    are added to `outcome`."""
    for step in measurement_schedule(outcome, settings):
        for planned in step:
            results = _results(outcome.nodes, planned, fabric)
            outcome.rounds_done += 1
            if planned.purpose == "contention":
                outcome.contention.append(ContentionRound(planned.alone, tuple(results)))
            elif planned.purpose == "retest":
                outcome.retests += results
            else:
                outcome.add(results, settings.bulk_bytes)


def switch_row(nodes: int, mode: Mode, ratio: float, runs: int, hop_gap: float = 0.2, noise: float = 0.05) -> SwitchRow:
    """Return how well probes infer leaves and their oversubscription, over runs with different seeds.

    Args:
        ratio: the true oversubscription of the leaves.
        hop_gap: share of the latency below one leaf that each further switch level adds.
        noise: standard deviation of a measured bandwidth as a share of its value.
    """
    measured = []
    for seed in range(runs):
        spec = FabricSpec(nodes, per_leaf=16, hop_gap=hop_gap, noise=noise, oversubscription=(ratio, 1.0))
        fabric = SimulatedFabric(spec, seed=seed)
        settings = ProbeSettings(mode=mode, seed=seed, device="none")
        outcome = ProbeOutcome(node_names(nodes))
        play(outcome, fabric, settings)
        tree = switch_tree(outcome, settings)
        leaves = tree.levels[0] if tree.levels else fabric.leaf * 0 - 1
        inferred = oversubscription(tree, outcome.matrix().index, outcome.contention).get(1, 0.0)
        measured.append((outcome.rounds_done, pair_f1(leaves, fabric.leaf), abs(inferred / ratio - 1)))
    rounds = sorted(row[0] for row in measured)[len(measured) // 2]
    worst, error = min(row[1] for row in measured), max(row[2] for row in measured)
    return SwitchRow(nodes, mode, hop_gap, noise, ratio, runs, rounds, round(worst, 4), round(error, 4))


def pair_f1(labels: Ints, truth: Ints) -> float:
    """Return how well clusters of nodes were recovered: the F1 score of 'these two nodes share a switch' over all
    pairs; 1 is perfect.

    Args:
        labels: inferred cluster of each node; below 0: none.
        truth: true cluster of each node.
    """
    upper = np.triu_indices(len(truth), 1)
    inferred = (labels[:, None] == labels[None, :])[upper] & (labels >= 0)[upper[0]]
    true = (truth[:, None] == truth[None, :])[upper]
    hits = int((inferred & true).sum())
    return 2 * hits / max(1, int(inferred.sum()) + int(true.sum()))


def _cells(plan: SimulationPlan) -> Iterable[tuple[int, float, float]]:
    return ((rounds, noise, bursts) for noise, bursts in plan.noise for rounds in plan.rounds)


def _switch_rows(plan: SimulationPlan, tell: Callable[[str], None]) -> Iterable[SwitchRow]:
    modes: tuple[tuple[int, Mode], ...] = ((128, "full"), (512, "sampled"))
    for nodes, mode in modes:
        for ratio in (1.0, 2.0, 4.0):
            tell(f"switches: {nodes} nodes, {mode}, {ratio:g}:1, {plan.switch_runs} runs")
            yield switch_row(nodes, mode, ratio, plan.switch_runs)


def _runtime_rows(plan: SimulationPlan, tell: Callable[[str], None]) -> Iterable[RuntimeRow]:
    modes: tuple[tuple[Mode, bool], ...] = (("health", False), ("sampled", False), ("sampled", True), ("full", False))
    for nodes in plan.sizes:
        for mode, told in modes:
            for rate in plan.gbit_per_s if mode == "full" else plan.gbit_per_s[-1:]:
                start = time.perf_counter()
                row = runtime_row(nodes, mode, rate, told)
                took_s = time.perf_counter() - start
                what = f"{mode}, switches told" if told else mode
                tell(f"runtime: {nodes} nodes, {what}, {rate:g} Gb/s in {took_s:.1f} s")
                yield row


def _results(names: Sequence[str], planned: Round, fabric: SimulatedFabric) -> list[PairResult]:
    figures = fabric.measure(planned.pairs)
    made = []
    for place, (a, b) in enumerate(planned.pairs):
        ends = [
            PairFigures(latency=Latency(min=low, p50=middle, p95=high), bytes_per_s=rate, n=8)
            for (low, middle, high), rate in zip(
                figures.latency_s[place].tolist(),
                (float(figures.back_bytes_per_s[place]), float(figures.there_bytes_per_s[place])),
                strict=True,
            )
        ]
        made.append(PairResult(names[a], names[b], planned.alone, len(planned.pairs), *ends))
    return made
