"""Finds speed changes, by comparing each device with the others and with its own past.

Each device has two cumulative sums (Page 1954) over windows of steps: one grows while the device is slower than it was,
one while it is faster. A sum grows by at most one half in a window, so a short burst is over before a sum reaches its
limit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class ChangeLimits:
    """When a change of a device's speed counts as lasting."""

    shift: float = math.log(1.2)
    """Change that is looked for, as natural logarithm of the factor on time: 20 %. A change of half this size or less
    never counts."""
    noise_shift: float = 2.5
    """With much noise, a larger change is looked for: this many standard deviations of a window. So a large change is
    found in spite of noise, before its windows count as noise, too."""
    windows: int = 4
    """Fewest windows that a change must last. Without noise, a change of `shift` or more is found after this number of
    windows."""
    quiet_windows: float = 1e6
    """Least mean number of windows between two false alarms on any device, for independent noise of known size around a
    known reference (Lorden 1971). Both are estimated here, so false alarms are more frequent where noise is large."""
    least_noise: float = 0.01
    """Smallest standard deviation of a window, as a share of its time: a few equal windows do not show that there is no
    noise."""
    small_sample: float = 2.0
    """The noise of n windows is multiplied by 1 + this number / n, because a few windows may be alike by chance."""
    reference: int = 100
    """Windows at the beginning, or after the last change, with which later ones are compared. The reference does not
    move on, because a slow drift would take it along."""
    newest: int = 100
    """Newest windows from which noise is estimated, besides the reference."""

    def shift_at(self, noise: float) -> float:
        """Return the change that is looked for, as natural logarithm of the factor on time.

        Args:
            noise: standard deviation of a window's logarithm.
        """
        return max(self.shift, self.noise_shift * noise)

    def limit(self, noise: float, devices: int) -> float:
        """Return the value of a sum at which a change counts, in units of `shift_at`.

        The sums are those of the log-likelihood ratio of a shift under normal noise, times (noise / shift)². Such a sum
        reaches log(n) after n windows or more, as mean (Lorden 1971). Limits on single windows only lengthen this.

        Args:
            noise: standard deviation of a window's logarithm.
            devices: number of devices; each has two sums.
        """
        alarms = math.log(2 * devices * self.quiet_windows)
        return max(self.windows / 2, (noise / self.shift_at(noise)) ** 2 * alarms)


DEFAULT_CHANGE_LIMITS = ChangeLimits()


@dataclass(frozen=True)
class LevelChange(Generic[Key]):
    """A lasting change of the times of one device, or of something else that is measured."""

    key: Key
    """The device, or whatever has these times."""
    factor: float
    """Speed after the change as a factor of that before it: 0.5 is half as fast."""
    began: int
    """Index of the first window of the change."""
    seen: int
    """Index of the window in which it was seen."""


@dataclass
class _Sums:
    """The two cumulative sums of a device, and the windows with which the device is compared."""

    past: list[float] = field(default_factory=list)
    """Logarithms of the device's time, less what all devices have in common, since the beginning or the last change:
    the first `ChangeLimits.reference` ones, then the newest ones."""
    excursion: list[tuple[int, float]] = field(default_factory=list)
    """(index, logarithm) of the windows since a sum left 0. They join `past` when both sums are 0 again, so that a
    change does not count as noise."""
    slower: float = 0.0
    faster: float = 0.0
    slower_since: int = 0
    """Index of the first window that `slower` is made of."""
    faster_since: int = 0

    def reference(self, limits: ChangeLimits) -> float | None:
        """Return the logarithm with which a window is compared: a median, whose standard error is 1.25 × noise / √n
        over n windows. None before there are enough windows for an error below a fifth of the shift."""
        noise = self.noise(limits)
        needed = math.inf if noise == math.inf else max(limits.windows, (7.0 * noise / limits.shift_at(noise)) ** 2)
        return median(self.past[: limits.reference]) if len(self.past) >= needed else None

    def noise(self, limits: ChangeLimits) -> float:
        """Return the standard deviation of a window: the largest of robust estimates, which for normal noise are equal.
        The 90th percentile shows noise that comes in one window of ten or more."""
        if not self.past:
            return math.inf
        centre = median(self.past)
        spread = 1.4826 * median(abs(value - centre) for value in self.past)
        tail = (sorted(self.past)[math.ceil(0.9 * len(self.past)) - 1] - centre) / 1.2816
        return max(limits.least_noise, spread, tail) * (1.0 + limits.small_sample / len(self.past))

    def add(self, index: int, deviation: float, limits: ChangeLimits) -> None:
        """Add a window to the sums.

        Args:
            index: its index.
            deviation: logarithm of the device's time, less its reference and what all devices have in common.
        """
        units = min(max(deviation / limits.shift_at(self.noise(limits)), -1.0), 1.0)
        self.slower_since = index if self.slower == 0.0 else self.slower_since
        self.faster_since = index if self.faster == 0.0 else self.faster_since
        self.slower = max(0.0, self.slower + units - 0.5)
        self.faster = max(0.0, self.faster - units - 0.5)

    def remember(self, index: int, value: float, limits: ChangeLimits) -> None:
        """Keep a window for later comparisons."""
        self.excursion.append((index, value))
        if self.slower == self.faster == 0.0:
            self.past += [value for _, value in self.excursion]
            self.excursion.clear()
            del self.past[limits.reference : -limits.newest]


class ChangeDetector(Generic[Key]):
    """Finds lasting changes of devices' speeds, window by window, while one plan runs.

    With `peers`, what all devices have in common (`common_part` of their deviations) is no change. So with one device
    nothing is found.
    """

    def __init__(self, limits: ChangeLimits = DEFAULT_CHANGE_LIMITS, peers: bool = True) -> None:
        """Create a detector that has seen no window.

        Args:
            limits: what counts as a change.
            peers: whether a device is compared with the other devices, too; if not, only with its own past.
        """
        self._limits, self._peers = limits, peers
        self._sums: dict[Key, _Sums] = {}
        self._windows = 0

    @property
    def undecided(self) -> bool:
        """Whether the last windows may be the beginning of a change."""
        return any(max(sums.slower, sums.faster) >= 0.5 for sums in self._sums.values())

    def add(self, window: Mapping[Key, float]) -> list[LevelChange[Key]]:
        """Add a window, and return the changes that it shows.

        Args:
            window: device -> natural logarithm of its seconds of computation divided by the predicted ones, over as
                many steps as in the other windows. A missing device is skipped.
        """
        index, self._windows = self._windows, self._windows + 1
        limits, deviations = self._limits, dict[Key, float]()
        for device, value in window.items():
            reference = self._sums.setdefault(device, _Sums()).reference(limits)
            if reference is not None:
                deviations[device] = value - reference
        common = common_part(list(deviations.values())) if self._peers else 0.0
        changes = []
        for device, value in window.items():
            sums = self._sums[device]
            if device in deviations:
                sums.add(index, deviations[device] - common, limits)
            sums.remember(index, value - common, limits)
            if max(sums.slower, sums.faster) < limits.windows / 2:  # the least limit
                continue
            limit = limits.limit(sums.noise(limits), len(window))
            if max(sums.slower, sums.faster) >= limit:
                began = sums.slower_since if sums.slower >= limit else sums.faster_since
                since = [later for position, later in sums.excursion if position >= began]
                shift = median(since) - (sums.reference(limits) or 0.0)
                changes.append(LevelChange(device, math.exp(-shift), began, index))
                self._sums[device] = _Sums(past=since)
        return changes


def common_part(values: Sequence[float]) -> float:
    """Return the median; if two values are in the middle, the one nearer to zero; 0.0 without values. So of two devices
    a change of one is seen, and an equal change of both is not."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(low, high, key=abs)
