"""NVML's answers, from a real shared library with recorded ones."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.probe.system.nvml import Gpu, Nvml, open_nvml

SOURCE = Path(__file__).parents[2] / "fakes" / "nvml.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(path), str(SOURCE)], check=True)
    return str(path)


@pytest.fixture
def nvml(library: str) -> Iterator[Nvml]:
    with open_nvml(library) as opened:
        assert opened is not None
        yield opened


def card(nvml: Nvml, index: int) -> Gpu:
    found = nvml.gpu(f"GPU-card{index}")
    assert found is not None
    return found


def test_the_library_is_opened_and_closed_once(library: str) -> None:
    inside = ctypes.CDLL(library)

    with open_nvml(library):
        assert inside.opened_now() == 1
    assert inside.opened_now() == 0


def test_a_machine_without_nvml_has_none(tmp_path: Path) -> None:
    with open_nvml(str(tmp_path / "absent.so")) as opened:
        assert opened is None


def test_a_driver_without_the_functions_answers_nothing() -> None:
    # The C library has none of NVML's names.
    with open_nvml("libc.so.6") as opened:
        assert opened is None
    assert Nvml(ctypes.CDLL("libc.so.6")).driver() is None
    assert Nvml(ctypes.CDLL("libc.so.6")).gpu("GPU-card0") is None


def test_a_device_is_found_by_its_uuid(nvml: Nvml) -> None:
    assert nvml.driver() == "550.54.15"
    assert card(nvml, 0).bus_id() == "0000:4e:00.0"
    assert card(nvml, 1).bus_id() == "0000:5f:00.0"
    assert nvml.gpu("GPU-other") is None


def test_what_a_card_tells_of_itself(nvml: Nvml) -> None:
    first = card(nvml, 0)

    assert first.pcie() == (3, 16, 5, 16)
    assert first.throttle_reasons() == ["sw_power_cap", "hw_thermal_slowdown"]
    assert first.ecc_errors() == 7
    assert first.energy_j() == 5e9
    assert first.power_w() == 431.25


def test_what_a_card_refuses_is_absent_and_idle_is_no_reason(nvml: Nvml) -> None:
    second = card(nvml, 1)

    assert second.ecc_errors() is None
    assert second.energy_j() is None
    assert second.nvlinks() == []
    assert second.throttle_reasons() == []


def test_peer_access_has_a_direction(nvml: Nvml) -> None:
    first, second = card(nvml, 0), card(nvml, 1)

    assert (first.reads_memory_of(second), second.reads_memory_of(first)) == ("ok", "no")


def test_each_nvlink_with_its_far_end(nvml: Nvml) -> None:
    links = card(nvml, 0).nvlinks()

    assert links == [("0000:5f:00.0", True), ("0000:5f:00.0", True), (None, False), ("switch", True)]


def test_critical_errors_meanwhile_are_collected(nvml: Nvml, library: str) -> None:
    with card(nvml, 0).watched_for_xid() as seen:
        assert ctypes.CDLL(library).events_now() == 1

    assert seen == [31, 79]
    assert ctypes.CDLL(library).events_now() == 0
