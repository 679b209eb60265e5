"""The energy counters of processors and memory, from folders like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.probe.system.powercap import POWERCAP, RaplCounters
from tests.fakes.powercap import FakePowercap


@pytest.fixture
def machine(tmp_path: Path) -> FakePowercap:
    """Two processors with memory; the second one's counter starts over after 40 J."""
    machine = FakePowercap(tmp_path / "powercap", largest_uj=262_143_328_850)
    machine.add("intel-rapl:0", "package-0", 5_000_000)
    machine.add("intel-rapl:0:0", "core", 1)
    machine.add("intel-rapl:0:1", "uncore", 1)
    machine.add("intel-rapl:0:2", "dram", 77)
    machine.add("intel-rapl:1", "package-1", 262_103_328_850)
    machine.add("intel-rapl:1:0", "dram", 0)
    machine.add("intel-rapl:2", "psys", 9)
    machine.add("intel-rapl-mmio:0", "package-0", 5_000_000)
    return machine


def test_no_part_counts_twice_and_a_counter_that_starts_over_goes_on(machine: FakePowercap) -> None:
    counters = RaplCounters(machine.folder)
    assert counters.take(0.0) == {}
    totals: dict[str, float] = {}
    for second in range(1, 101):
        for zone, joules in (("0", 101.3), ("0:0", 80.0), ("0:1", 9.0), ("0:2", 21.7), ("1", 98.9), ("1:0", 20.1)):
            machine.use(f"intel-rapl:{zone}", joules)
        machine.use("intel-rapl:2", 300.0)
        for name, joules in counters.take(float(second)).items():
            totals[name] = totals.get(name, 0.0) + joules
    expected = {"package-0": 10_130, "dram-0": 2_170, "package-1": 9_890, "dram-1": 2_010, "psys": 30_000}
    assert totals == pytest.approx(expected, rel=0.001)


def test_many_turns_of_a_small_counter(tmp_path: Path) -> None:
    machine = FakePowercap(tmp_path, largest_uj=65_532_610_987)
    machine.add("intel-rapl:0", "package-0", 65_000_000_000)
    counters, total = RaplCounters(tmp_path), 0.0
    counters.take(0.0)
    for turn in range(1, 201):
        machine.use("intel-rapl:0", 2_500.0)
        total += counters.take(10.0 * turn)["package-0"]
    assert total == pytest.approx(500_000, rel=0.001)


def test_a_counter_that_vanishes_in_the_middle_is_absent_until_it_is_back(machine: FakePowercap) -> None:
    counters, path = RaplCounters(machine.folder), machine.folder / "intel-rapl:0"
    counters.take(0.0)
    path.rename(path.with_name("away"))
    assert set(counters.take(1.0)) == {"package-1", "dram-0", "dram-1", "psys"}
    path.with_name("away").rename(path)
    machine.use("intel-rapl:0", 50.0)
    assert "package-0" not in counters.take(2.0)
    machine.use("intel-rapl:0", 7.0)
    assert counters.take(3.0)["package-0"] == pytest.approx(7.0)


@pytest.mark.parametrize("text", ["", "many\n", "-5\n", "nan\n", "1e9\n", "\xff\n", "12 13\n", "9" * 4999])
def test_garbage_in_a_counter_is_absent(machine: FakePowercap, text: str) -> None:
    counters = RaplCounters(machine.folder)
    counters.take(0.0)
    (machine.folder / "intel-rapl:0" / "energy_uj").write_text(text, encoding="latin-1")
    machine.use("intel-rapl:1", 5.0)
    taken = counters.take(1.0)
    assert "package-0" not in taken
    assert taken["package-1"] == pytest.approx(5.0)


@pytest.mark.parametrize("largest", ["", "word\n", "100\n", None])
def test_without_a_largest_value_that_can_be_a_counter_does_not_start_over(
    machine: FakePowercap, largest: str | None
) -> None:
    file = machine.folder / "intel-rapl:1" / "max_energy_range_uj"
    file.unlink() if largest is None else file.write_text(largest)
    counters = RaplCounters(machine.folder)
    counters.take(0.0)
    machine.use("intel-rapl:1", 100.0)
    assert "package-1" not in counters.take(1.0)


def test_a_counter_that_was_set_back_or_not_read_for_long_does_not_count(machine: FakePowercap) -> None:
    counters = RaplCounters(machine.folder)
    counters.take(0.0)
    (machine.folder / "intel-rapl:0" / "energy_uj").write_text("10\n")  # the module was loaded anew
    assert "package-0" not in counters.take(1.0)
    machine.use("intel-rapl:1", 10.0)
    assert counters.take(500.0) == {}


def test_unreadable_or_absent_counters_are_absent(machine: FakePowercap, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root reads files of any mode
        for file in machine.folder.glob("*/energy_uj"):
            file.unlink()
            file.mkdir()
    else:
        for file in machine.folder.glob("*/energy_uj"):
            file.chmod(0)
    monkeypatch.setenv(POWERCAP, str(machine.folder))
    counters = RaplCounters()
    assert (counters.take(0.0), counters.take(1.0)) == ({}, {})
    counters = RaplCounters(machine.folder / "absent")
    assert (counters.take(0.0), counters.take(1.0)) == ({}, {})
