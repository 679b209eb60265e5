"""Lasting changes of devices' speeds: found, and told apart from bursts, periodic noise and a slower machine."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.planner.adapt.straggler import ChangeDetector, ChangeLimits
from hpctrain.records.format.node_name import DeviceId

DEVICES = [DeviceId(f"node{number}:cpu0") for number in range(4)]
LIMITS = ChangeLimits()


def found(series, limits=LIMITS):
    """The changes in a series: [window][device] -> factor on time."""
    detector = ChangeDetector(limits)
    return [
        change
        for window in series
        for change in detector.add({device: math.log(factor) for device, factor in zip(DEVICES, window, strict=False)})
    ]


def noisy(windows, sigma, seed, devices=4):
    rng = random.Random(seed)
    return [[math.exp(rng.gauss(0, sigma)) for _ in range(devices)] for _ in range(windows)]


def scaled(series, device, factor, start=0, end=None):
    """The series with one device slower by `factor` in the windows [start, end)."""
    return [
        [value * (factor if number == device and start <= index < (end or len(series)) else 1.0)
         for number, value in enumerate(window)]
        for index, window in enumerate(series)
    ]  # fmt: skip


def test_a_device_that_becomes_slower_is_found_in_four_quiet_windows():
    (change,) = found(scaled([[1.0] * 4] * 30, device=2, factor=1.2, start=10))
    assert (change.key, change.began, change.seen) == (DEVICES[2], 10, 13)
    assert change.factor == pytest.approx(1 / 1.2)


@pytest.mark.parametrize(("factor", "windows"), [(1.2, 4), (3.0, 4), (1.15, 8)])
def test_a_smaller_change_takes_more_quiet_windows(factor, windows):
    (change,) = found(scaled([[1.0] * 4] * 40, device=2, factor=factor, start=10))
    assert change.seen - change.began + 1 == windows


def test_of_two_devices_the_one_that_changed_is_found():
    (change,) = found(scaled([[1.0] * 2] * 20, device=1, factor=2.0, start=8))
    assert change.key == DEVICES[1]


def test_a_device_that_recovers_is_found_too():
    slow, fast = found(scaled([[1.0] * 2] * 60, device=0, factor=2.0, start=10, end=30))
    assert (slow.key, fast.key) == (DEVICES[0], DEVICES[0])
    assert (slow.factor, fast.factor) == (pytest.approx(0.5), pytest.approx(2.0))
    assert fast.began == 30


@settings(max_examples=50, deadline=None)
@example(seed=79408, factor=2.0, start=20, device=0)  # 0.55, because the first four slow windows were fast ones
@given(
    seed=st.integers(0, 2**32),
    factor=st.floats(1.3, 5.0),
    start=st.integers(20, 40),  # before, noise alone can make a device's past too little known
    device=st.integers(0, 3),
)
def test_a_change_by_30_percent_is_found_within_12_windows_of_3_percent_noise(seed, factor, start, device):
    changes = found(scaled(noisy(start + 12, 0.03, seed), device, factor, start))
    assert [change.key for change in changes] == [DEVICES[device]]
    # The median of four windows and that of the devices: an error of a tenth is rare, of a fifth hardly possible.
    assert changes[0].factor == pytest.approx(1 / factor, rel=0.2)


@pytest.mark.parametrize("sigma", [0.005, 0.03, 0.1, 0.3])
def test_a_thousand_windows_of_noise_show_no_change(sigma):
    assert found(noisy(1000, sigma, seed=7)) == []


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bursts=st.lists(st.tuples(st.integers(6, 190), st.integers(1, 3), st.floats(1.2, 100.0)), max_size=3, unique_by=(
        lambda burst: burst[0] // 40
    )),
)  # fmt: skip
def test_bursts_of_three_windows_are_no_change(seed, bursts):
    series = noisy(200, 0.01, seed)
    for place, (start, length, factor) in enumerate(bursts):
        series = scaled(series, place, factor, start, start + length)
    assert found(series) == []


@pytest.mark.parametrize(("period", "busy"), [(2, 1), (4, 2), (6, 3), (10, 3), (30, 3)])
def test_periodic_noise_is_no_change(period, busy):
    series = [[1.6 if index % period >= period - busy else 1.0, 1.0, 1.0, 1.0] for index in range(1000)]
    assert found(series) == []


@settings(max_examples=30, deadline=None)
@given(factors=st.lists(st.floats(0.2, 5.0), min_size=40, max_size=80))
def test_what_all_devices_have_in_common_is_no_change(factors):
    assert found([[factor, 1.1 * factor, 0.7 * factor, factor] for factor in factors]) == []


def test_a_slow_drift_is_found():
    """A device that becomes slower by 1 % every 5 windows: its reference does not drift along."""
    series = [[math.exp(0.01 * index / 5), 1.0, 1.0, 1.0] for index in range(300)]
    changes = found(series)
    assert {change.key for change in changes} == {DEVICES[0]}
    assert all(change.factor < 1 for change in changes)


def test_half_the_shift_never_counts():
    assert found(scaled([[1.0] * 4] * 1000, device=0, factor=math.exp(0.49 * LIMITS.shift), start=10)) == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.permutations(range(4)))
def test_the_order_of_devices_does_not_matter(seed, order):
    series = scaled(noisy(60, 0.05, seed), 1, 1.5, 30)
    detector, reordered = ChangeDetector(), ChangeDetector()
    for window in series:
        named = {device: math.log(value) for device, value in zip(DEVICES, window, strict=True)}
        one = detector.add(named)
        other = reordered.add({DEVICES[number]: named[DEVICES[number]] for number in order})
        assert sorted(one, key=str) == sorted(other, key=str)


def test_one_device_has_nothing_to_be_compared_with():
    assert found(scaled([[1.0]] * 50, device=0, factor=3.0, start=10)) == []


def recorded(name):
    """A series of the lab: devices, and [window][device] -> logarithm of the seconds of computation."""
    series = json.loads((Path(__file__).with_name("recorded") / f"{name}.json").read_text())
    return [
        {DeviceId(device): math.log(value) for device, value in zip(series["devices"], window, strict=True)}
        for window in series["compute_s"]
    ]


def found_in(windows):
    detector = ChangeDetector(LIMITS)
    return [change for window in windows for change in detector.add(window)]


def test_a_recorded_node_that_gets_half_of_its_share_is_found_in_spite_of_noise():
    (change,) = found_in(recorded("slowed"))
    assert change.key == "node2:cpu0"
    assert change.factor == pytest.approx(0.6, abs=0.1)  # of the others, which get what it leaves
    assert 20 <= change.began <= 21
    assert change.seen - change.began <= 6


def test_recorded_bursts_of_other_work_are_no_change():
    assert found_in(recorded("burst")) == []


@pytest.mark.parametrize(("factor", "windows"), [(1.5, 20), (2.0, 12)])
def test_a_large_change_is_found_in_noise_of_15_percent(factor, windows):
    (change,) = found(scaled(noisy(40 + windows, 0.15, seed=3), 2, factor, 40))
    assert change.key == DEVICES[2]
