"""Measures the speed of each device, relative to its speed by the topology, from rows of metrics-ranks.jsonl.

A window is the steps that one row of each rank covers. A device's time in a window is the predicted time, multiplied by
two factors: one of the device's part of the model, because a part with the embedding or the head may be predicted worse
than blocks, and one of the device itself. Devices with parts of one kind, and changes of a device's time, show how
large each factor is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from hpctrain.planner.adapt.slow_links import LinkChange, LinkWatch, NodePair
from hpctrain.planner.adapt.straggler import (
    DEFAULT_CHANGE_LIMITS,
    ChangeDetector,
    ChangeLimits,
    LevelChange,
    common_part,
)
from hpctrain.planner.layout.plan_conversion import CostedLayout, layout_of_plan
from hpctrain.planner.replan.calibration import passes_s
from hpctrain.planner.replan.replan import TopologyChanges, apply_changes
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology

LEAST_DIFFERENCE = math.log(1.1)
"""Difference from the speed by the topology, as natural logarithm, below which a device counts as having this speed.
A search among equal devices is shorter, and noise then does not change the plan."""
GRID = math.log(1.05)
"""Natural logarithm of 1.05. Speeds are rounded to powers of 1.05, for the same reasons."""
NEWEST_WINDOWS = 30
"""Largest number of windows from whose median a speed follows: the newest ones since the last change."""
LEAST_LINK = 1e-3
"""Least bandwidth of a slow link, as a factor of that in the topology."""
MOST_OF_SLOW_LINK = 0.8
"""Bandwidth from which on a link counts as fast again, as a factor of that in the topology."""
LINK_HALVINGS = 12
"""Number of times that the interval in which a link's bandwidth lies is halved."""

_Role = tuple[bool, bool]
"""Whether a device's part of the model has the embedding, and whether it has the head."""


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast a device was."""

    factor: float
    """Speed divided by the speed by the topology, relative to the other devices: a device with 0.5 takes twice as
    long."""
    spread: float
    """Median absolute deviation of the windows' times, as a share of the time."""
    windows: int
    """Number of windows from which the factor follows."""


@dataclass(frozen=True)
class MeasuredSpeeds:
    """What the rows of a run say about its devices."""

    changes: TopologyChanges
    """Changes to the topology that give devices their measured speeds. Devices that no window of any plan has measured
    keep their speed; a device that the present plan leaves out keeps the speed that was measured last."""
    devices: Mapping[DeviceId, DeviceSpeed]
    """The devices of the present plan; {} before there are enough windows."""
    speed_changes: tuple[LevelChange[DeviceId], ...]
    """Lasting changes since the present plan began."""
    links: Mapping[NodePair, float]
    """Links whose messages take longer -> their bandwidth as a factor of the topology's."""
    suspects: tuple[NodePair, ...]
    """Links of which one or more became slower since the present plan began; the rows do not show which."""
    changed_at: int | None
    """Step after which the last change of a device or a link was seen; None without one."""
    undecided: bool
    """Whether the last windows may be the beginning of another change."""
    steady_since: int
    """First step with the present speeds: the first step of the first window since the last change or, without a
    change, of the plan's first window."""
    windows: int
    """Number of windows since `steady_since`, at most `NEWEST_WINDOWS`."""

    def reasons(self) -> list[str]:
        """Return a clause for each slow link, then one for each device whose speed differs from that by the topology,
        the slowest first."""
        unlike = [(speed.factor, device) for device, speed in self.devices.items() if _rounded(speed.factor) != 0.0]
        links = [
            f"messages between {a} and {b} travel at {factor:.2g} of the bandwidth that was measured"
            for (a, b), factor in self.links.items()
        ]
        return links + [
            f"{device} computes {1 / factor:.2g} times as long as predicted, relative to the others "
            f"(±{100 * self.devices[device].spread:.0f} % over {self.devices[device].windows} windows)"
            for factor, device in sorted(unlike)
        ]


@dataclass(frozen=True)
class _Window:
    """The measured times of all devices in one window."""

    first_step: int
    slowness: Mapping[DeviceId, float]
    """Device -> logarithm of its measured seconds of computation divided by the predicted ones."""


class SpeedTracker:
    """The speeds of the devices of one attempt, window by window, over all its plans."""

    def __init__(self, run: Run, spec: Spec, topology: Topology, limits: ChangeLimits = DEFAULT_CHANGE_LIMITS) -> None:
        """Create a tracker without any window.

        Args:
            run: the run file.
            spec: the run's model with a known vocabulary size.
            topology: all nodes, with the speeds that the probe measured.
            limits: which changes of speed count as lasting.
        """
        self._run, self._spec, self._topology, self._limits = run, spec, topology, limits
        self._role_excess: dict[_Role, float] = {}
        self._device_excess: dict[DeviceId, float] = {}
        self._links: dict[NodePair, float] = {}
        self._addresses: Mapping[str, str] = {}
        self._begin(None, {}, {})

    def _begin(self, plan: Plan | None, predicted: dict[DeviceId, float], roles: dict[DeviceId, _Role]) -> None:
        self._plan, self._predicted, self._roles = plan, predicted, roles
        self._link_watch = None if plan is None else LinkWatch(plan, self._addresses)
        self._link_changes: list[LinkChange] = []
        self._suspects: tuple[NodePair, ...] = ()
        self._rows: list[RankRow] = []
        self._detector = ChangeDetector[DeviceId](self._limits)
        self._windows: list[_Window] = []
        self._count = 0
        self._changes: list[LevelChange[DeviceId]] = []
        self._changed_at: int | None = None
        self._steady_since = 0

    def begin(self, plan: Plan, addresses: Mapping[str, str] | None = None) -> None:
        """Begin a generation: the rows that follow are those of this plan.

        Args:
            plan: the plan of the generation.
            addresses: address of a node -> its name, for what ranks sent over TCP.

        Raises:
            InputError: the cost model cannot predict the plan on the topology's nodes.
        """
        self._settle()
        self._addresses = {} if addresses is None else addresses
        scene = self._scene(self._topology, plan)
        predicted: dict[DeviceId, float] = {}
        roles: dict[DeviceId, _Role] = {}
        last = len(plan.stages) - 1
        for number, replica in enumerate(plan.replicas):
            for stage, devices in enumerate(replica.devices):
                for device in devices:
                    predicted[device] = predicted.get(device, 0.0) + passes_s(scene, number, stage)
                    first, head = roles.get(device, (False, False))
                    roles[device] = (first or stage == 0, head or stage == last)
        self._begin(plan, predicted, roles)

    def _scene(self, topology: Topology, plan: Plan | None = None) -> CostedLayout:
        """Return a plan's layout, by default that of the present plan, with the plain constants of the cost model."""
        plan = self._plan if plan is None else plan
        assert plan is not None, "a generation began"
        return layout_of_plan(self._run, self._spec, plan.model_copy(update={"profile": None}), topology)

    def add(self, rows: Iterable[RankRow]) -> None:
        """Add rows of the present plan, in file order. Rows of other devices and rows without a time are skipped. A
        window counts when it has a row of every rank."""
        for row in rows:
            if self._rows and row.step != self._rows[0].step:
                self._rows = []
            if self._is_of_plan(row) and 0 < row.compute_s < math.inf:
                self._rows.append(row)
            if self._plan is not None and len({row.rank for row in self._rows}) == self._plan.world_size:
                self._add_window(self._rows)
                self._rows = []

    def _is_of_plan(self, row: RankRow) -> bool:
        ranks = [] if self._plan is None else self._plan.ranks
        return 0 <= row.rank < len(ranks) and ranks[row.rank] == row.device

    def _add_window(self, rows: Sequence[RankRow]) -> None:
        slowness = {
            DeviceId(row.device): math.log(row.compute_s / self._predicted[DeviceId(row.device)]) for row in rows
        }
        window = _Window(rows[0].step - rows[0].steps + 1, slowness)
        if not self._windows:
            self._steady_since = window.first_step
        self._windows.append(window)
        self._count += 1
        if self._count == self._limits.windows:  # before any change can be found
            self._learn_roles()
        if changes := self._detector.add(slowness):
            self._changes += changes
            # Several devices may change at once, and be found one after the other.
            self._cut(max(change.began for change in changes), rows[0].step)
            self._link_watch = None if self._plan is None else LinkWatch(self._plan, self._addresses)
            self._link_changes = []
        elif self._link_watch is not None:
            self._link_changes += self._link_watch.add(rows, math.exp(median(slowness.values())))
        if self._link_changes and not self._detector.undecided:  # else a slow device may be the cause
            self._add_link_changes(rows[0].step)
        self._windows = self._windows[-NEWEST_WINDOWS:]

    def _cut(self, began: int, step: int) -> None:
        """Forget the windows before a change.

        Args:
            began: index of its first window.
            step: step after which it was seen.
        """
        self._windows = self._windows[max(0, began - (self._count - len(self._windows))) :]
        self._steady_since = self._windows[0].first_step
        self._changed_at = step

    def _add_link_changes(self, step: int) -> None:
        for change in self._link_changes:
            if len(change.pairs) != 1:
                self._confirm(change, step)
                continue
            (pair,) = change.pairs
            if change.extra_s > 0:
                self._links[pair] = self._link_factor(pair, change.extra_s)
                self._cut(self._count - self._limits.windows, step)
            elif self._links.pop(pair, None) is not None:
                self._cut(self._count - self._limits.windows, step)
        self._link_changes = []

    def _confirm(self, change: LinkChange, step: int) -> None:
        """Record the new bandwidth of those of several suspected links whose bandwidth changed by the counters of the
        kernels. If there are none and messages take longer, all these links are suspects."""
        bandwidths = {pair: self._links.get(pair, 1.0) * factor for pair, factor in change.factors.items()}
        slower = {pair: max(LEAST_LINK, factor) for pair, factor in bandwidths.items() if factor < MOST_OF_SLOW_LINK}
        confirmed = {pair for pair in bandwidths if pair in self._links or pair in slower}
        self._suspects = () if confirmed or change.extra_s <= 0 else change.pairs
        if confirmed:
            self._links = {pair: factor for pair, factor in self._links.items() if pair not in confirmed} | slower
            self._cut(self._count - self._limits.windows, step)

    def _link_factor(self, pair: NodePair, extra_s: float) -> float:
        """Return the factor on a link's bandwidth with which a predicted step takes `extra_s` longer than now."""
        present = self._links.get(pair, 1.0)

        def step_s(factor: float) -> float:
            changes = replace(self.measured().changes, links=self._links | {pair: factor})
            scene = self._scene(apply_changes(self._topology, changes))
            return predict(scene.cost, scene.layout, whole=True).total

        wanted_s = step_s(present) + extra_s
        low, high = math.log(LEAST_LINK), math.log(present)
        for _ in range(LINK_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if step_s(math.exp(middle)) > wanted_s else (low, middle)
        return math.exp((low + high) / 2)

    def measured(self) -> MeasuredSpeeds:
        """Return the present speeds."""
        devices = self._speeds()
        excess = self._device_excess | {device: -math.log(speed.factor) for device, speed in devices.items()}
        return MeasuredSpeeds(
            changes=replace(_topology_changes(self._topology, excess), links=dict(self._links)),
            devices=devices,
            speed_changes=tuple(self._changes),
            links=dict(self._links),
            suspects=self._suspects,
            changed_at=self._changed_at,
            undecided=self._detector.undecided,
            steady_since=self._steady_since,
            windows=len(self._windows),
        )

    def _series(self) -> dict[DeviceId, list[float]]:
        return {device: [window.slowness[device] for window in self._windows] for device in self._predicted}

    def _learn_roles(self) -> None:
        """Record by how much parts of the model with each new role (`_Role`) take longer than predicted."""
        by_role: dict[_Role, list[float]] = {}
        for device, values in self._series().items():
            by_role.setdefault(self._roles[device], []).append(median(values) - self._device_excess.get(device, 0.0))
        # Of two devices, the slower one counts as slow, not the other as fast.
        self._role_excess = {role: median_low(levels) for role, levels in by_role.items()} | self._role_excess

    def _speeds(self) -> dict[DeviceId, DeviceSpeed]:
        """Return the speeds of the present plan's devices; {} before there are enough windows."""
        if self._count < self._limits.windows:
            return {}
        series = self._series()
        levels = {device: median(values) for device, values in series.items()}
        excess = {device: level - self._role_excess[self._roles[device]] for device, level in levels.items()}
        common = common_part(list(excess.values()))
        return {
            device: DeviceSpeed(
                math.exp(common - excess[device]),
                median(abs(value - levels[device]) for value in series[device]),
                len(series[device]),
            )
            for device in levels
        }

    def _settle(self) -> None:
        """Record the speeds of the present plan's devices, some of which the next plan may leave out."""
        self._device_excess |= {device: -math.log(speed.factor) for device, speed in self._speeds().items()}


def _topology_changes(topology: Topology, excess: Mapping[DeviceId, float]) -> TopologyChanges:
    """Return the changes that give devices their measured speeds. A node whose measured devices are all equally slow
    is slow as a whole, with those of its devices that were not measured.

    Args:
        excess: device -> logarithm of its time divided by the expected one.
    """
    slow: dict[str, float] = {}
    slow_devices: dict[DeviceId, float] = {}
    for node in topology.nodes:
        factors = {
            device: math.exp(_rounded(math.exp(-excess[device])))
            for device in (DeviceId.of(node.id, device.id) for device in node.devices)
            if device in excess
        }
        if len(set(factors.values())) == 1:
            slow[node.id] = next(iter(factors.values()))
        else:
            slow_devices |= factors
    return TopologyChanges(
        slow={node: factor for node, factor in slow.items() if factor != 1.0},
        slow_devices={device: factor for device, factor in slow_devices.items() if factor != 1.0},
    )


def _rounded(factor: float) -> float:
    """Return the logarithm of a factor on speed, rounded to a multiple of `GRID`; 0.0 if the speed counts as that by
    the topology."""
    logarithm = math.log(factor)
    return 0.0 if abs(logarithm) < LEAST_DIFFERENCE else round(logarithm / GRID) * GRID


def measured_topology(
    run: Run, spec: Spec, topology: Topology, generations: Iterable[tuple[Plan, Sequence[RankRow]]]
) -> MeasuredSpeeds:
    """Return the speeds of a run's devices.

    Args:
        run: the run file.
        spec: the run's model with a known vocabulary size.
        topology: all nodes, with the speeds that the probe measured.
        generations: the plan of each generation of the attempt and its rows of metrics-ranks.jsonl, in order.

    Raises:
        InputError: the cost model cannot predict a plan on the topology's nodes.
    """
    tracker = SpeedTracker(run, spec, topology)
    for plan, rows in generations:
        tracker.begin(plan)
        tracker.add(rows)
    return tracker.measured()
