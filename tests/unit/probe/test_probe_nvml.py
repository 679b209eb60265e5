"""NVML's answers, from a real shared library with recorded ones."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hpctrain.probe.system.gpu import Gpu, driver_version, find_gpu, gpu_at, machine_gpus, open_nvml
from hpctrain.records.topology.evidence import PcieLink
from tests.fakes.fake_nvml import build_nvml, load_nvml


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts another library in the place of the driver's."""
    return partial(load_nvml, monkeypatch)


@pytest.fixture
def nvml(library: str, load: Callable[[str], None]) -> Iterator[None]:
    load(library)
    with open_nvml():
        yield


def card(index: int) -> Gpu:
    gpu = find_gpu(f"GPU-card{index}")
    assert gpu is not None
    return gpu


def test_the_library_is_opened_and_closed_once(library: str, load: Callable[[str], None]) -> None:
    inside = ctypes.CDLL(library)
    load(library)

    with open_nvml():
        assert inside.opened_now() == 1
    assert inside.opened_now() == 0


# The C library has none of NVML's names.
@pytest.mark.parametrize("path", ["/absent/libnvidia-ml.so.1", "libc.so.6"])
def test_a_machine_without_nvml_answers_nothing(path: str, load: Callable[[str], None]) -> None:
    load(path)
    with open_nvml():
        assert driver_version() is None
        assert find_gpu("GPU-card0") is None


@pytest.mark.usefixtures("nvml")
def test_a_device_is_found_by_its_uuid() -> None:
    assert driver_version() == "550.54.15"
    assert card(0).bus_id() == "0000:4e:00.0"
    assert card(1).bus_id() == "0000:5f:00.0"
    assert find_gpu("GPU-other") is None


@pytest.mark.usefixtures("nvml")
def test_a_device_is_found_by_its_address() -> None:
    found = gpu_at("0000:5f:00.0")
    assert found is not None
    assert found.bus_id() == "0000:5f:00.0"
    assert gpu_at("0000:99:00.0") is None


@pytest.mark.usefixtures("nvml")
def test_what_a_card_tells_of_itself() -> None:
    first = card(0)

    assert first.pcie() == PcieLink(generation=3, width=16, generation_max=5, width_max=16)
    assert first.throttle_reasons() == ["sw_power_cap", "hw_thermal_slowdown"]
    assert first.ecc_errors() == 7
    assert first.energy_j() == 5e9
    assert first.power_w() == 431.25
    assert first.ecc_errors(corrected=True) == 3
    assert (first.use(), first.temperature_c()) == (0.87, 83)
    assert (first.clock_hz(), first.clock_hz(of_memory=True)) == (1.755e9, 2.619e9)


@pytest.mark.usefixtures("nvml")
def test_what_a_card_refuses_is_absent_and_idle_is_no_reason() -> None:
    second = card(1)

    assert second.ecc_errors() is None
    assert second.energy_j() is None
    assert second.use() is None
    assert second.nvlinks() == []
    assert second.throttle_reasons() == []


@pytest.mark.usefixtures("nvml")
def test_peer_access_has_a_direction() -> None:
    first, second = card(0), card(1)

    assert (first.reads_memory_of(second), second.reads_memory_of(first)) == ("ok", "no")


@pytest.mark.usefixtures("nvml")
def test_each_nvlink_with_its_far_end() -> None:
    links = card(0).nvlinks()

    assert links == [("0000:5f:00.0", True), ("0000:5f:00.0", True), (None, False), ("switch", True)]


@pytest.mark.usefixtures("nvml")
def test_critical_errors_meanwhile_are_collected(library: str) -> None:
    with card(0).watched_for_xid() as take:
        assert ctypes.CDLL(library).events_now() == 1
        assert take() == [31, 79]
        assert take() == []

    assert ctypes.CDLL(library).events_now() == 0


def test_each_gpu_has_a_name_and_one_in_mig_mode_that_of_its_first_part(
    library: str, load: Callable[[str], None], tmp_path: Path
) -> None:
    load(library)
    assert machine_gpus(tmp_path) == ["GPU-card0", "MIG-part0"]


def test_amds_gpus_are_numbered_without_its_cpus(load: Callable[[str], None], tmp_path: Path) -> None:
    load("/absent/libnvidia-ml.so.1")
    for number, text in enumerate(["simd_count 0\n", "cpu_cores_count 0\nsimd_count 304\n", "simd_count 304\n", "x\n"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(text)
    assert machine_gpus(tmp_path) == ["0", "1"]
    assert machine_gpus(tmp_path / "absent") == []
