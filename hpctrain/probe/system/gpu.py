"""Reads facts about a GPU from NVIDIA's management library (NVML), and facts about any PCI device from sysfs.

Nothing in this module needs root or changes a device. A fact that the machine does not give, or any fact of NVML on a
machine without NVML, is None.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pynvml

from hpctrain.base.system.kernel import kernel_number, kernel_text
from hpctrain.records.topology.evidence import GIGATRANSFERS, PcieLink

_P2P_READ = 0
"""Value of NVML_P2P_CAPS_INDEX_READ, which pynvml does not define as a number."""
THROTTLE_REASONS = {
    pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting: "applications_clocks_setting",
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    pynvml.nvmlClocksThrottleReasonDisplayClockSetting: "display_clock_setting",
}
"""Bit of NVML -> name of the reason for lowered clocks. The reason idle is left out, because it is no throttling."""
XIDS_MAX = 100
"""Most Xids of a GPU that are taken at once; a broken GPU may report them without end."""
SYSFS = Path("/sys")
KFD_NODES = SYSFS / "class/kfd/kfd/topology/nodes"
"""Where AMD's kernel driver lists CPUs and GPUs."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_GENERATIONS = {rate: generation for generation, rate in GIGATRANSFERS.items()}


@contextlib.contextmanager
def open_nvml() -> Iterator[None]:
    """Load NVML for the `with` block. On a machine without NVML the block runs too, and its queries return None."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield
        return
    try:
        yield
    finally:
        _ask(pynvml.nvmlShutdown)


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, as '550.54.15'; None without the driver."""
    return _ask(pynvml.nvmlSystemGetDriverVersion) or None


def find_gpu(uuid: str) -> Gpu | None:
    """Return the GPU with that UUID ('GPU-…'); None when NVML does not know it."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)
    return None if handle is None else Gpu(handle)


def gpu_at(address: str) -> Gpu | None:
    """Return the GPU at a PCI address such as 0000:4e:00.0; None when NVML does not know it."""
    handle = _ask(pynvml.nvmlDeviceGetHandleByPciBusId, address)
    return None if handle is None else Gpu(handle)


def gpu_uuids() -> list[str]:
    """Return a name for CUDA_VISIBLE_DEVICES of each GPU of this machine, in NVML's order; empty without NVML.

    It is the GPU's UUID ('GPU-…'). For a GPU in MIG mode it is the UUID of its first MIG device ('MIG-…'): NCCL refuses
    two ranks on one GPU, even on two of its MIG devices.
    """
    handles = [_ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0)]
    parts = [(handle, _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, 0)) for handle in handles]
    uuids = [_ask(pynvml.nvmlDeviceGetUUID, part or handle) for handle, part in parts]
    return [uuid for uuid in uuids if uuid]


def machine_gpus(kfd_nodes: Path = KFD_NODES) -> list[str]:
    """Return a name of each GPU of the machine: the UUIDs of NVIDIA GPUs, or if there are none the numbers 0, 1, … of
    AMD GPUs; empty without GPUs.

    Args:
        kfd_nodes: the folder of AMD's kernel driver. A GPU is a node there that has SIMD units and may be read.
    """
    with open_nvml():
        uuids = gpu_uuids()
    if uuids:
        return uuids
    count = 0
    for properties in kfd_nodes.glob("*/properties"):
        with contextlib.suppress(OSError):
            values = dict(line.split(" ", 1) for line in properties.read_text().splitlines() if " " in line)
            count += values.get("simd_count", "0") != "0"
    return [str(index) for index in range(count)]


class Gpu:
    """One GPU, queried through NVML."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def bus_id(self) -> str | None:
        """Return the PCI address in the kernel's form, as 0000:4e:00.0; None when NVML does not report it."""
        return _address(_ask(pynvml.nvmlDeviceGetPciInfo, self._handle))

    def pcie(self) -> PcieLink | None:
        """Return the present generation and width of the PCIe link, and the greatest that both device and slot support;
        None unless NVML reports all four."""
        queries = (
            pynvml.nvmlDeviceGetCurrPcieLinkGeneration, pynvml.nvmlDeviceGetCurrPcieLinkWidth,
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration, pynvml.nvmlDeviceGetMaxPcieLinkWidth,
        )  # fmt: skip
        figures = [_ask(query, self._handle) for query in queries]
        if not all(figures):
            return None
        generation, width, generation_max, width_max = figures
        return PcieLink(generation=generation, width=width, generation_max=generation_max, width_max=width_max)

    def throttle_reasons(self) -> list[str]:
        """Return the present reasons for lowered clocks, as named in `THROTTLE_REASONS`; empty when NVML does not
        report them."""
        bits = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle)
        if bits is None:  # drivers before 535 have the older name alone
            bits = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        return [word for bit, word in THROTTLE_REASONS.items() if (bits or 0) & bit]

    def ecc_errors(self, corrected: bool = False) -> int | None:
        """Return the number of uncorrectable memory errors since the driver was loaded, or of those that the hardware
        corrected; None where NVML does not count them, as without ECC memory."""
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED if corrected else pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return _ask(pynvml.nvmlDeviceGetTotalEccErrors, self._handle, kind, pynvml.NVML_VOLATILE_ECC)

    def use(self) -> float | None:
        """Return the share of the driver's last sampling period (1/6 to 1 s) in which a kernel ran; None when NVML does
        not report it, as for a GPU in MIG mode."""
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        return None if rates is None else min(1.0, rates.gpu / 100)

    def temperature_c(self) -> float | None:
        """Return the temperature in degrees Celsius; None when NVML does not report it."""
        return _ask(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU)

    def clock_hz(self, of_memory: bool = False) -> float | None:
        """Return the present clock of the multiprocessors, or of the memory, in hertz; None when NVML does not report
        it."""
        megahertz = _ask(
            pynvml.nvmlDeviceGetClockInfo,
            self._handle,
            pynvml.NVML_CLOCK_MEM if of_memory else pynvml.NVML_CLOCK_SM,
        )
        return None if megahertz is None else megahertz * 1e6

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded, in joules; None when NVML does not report it."""
        millijoules = _ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else millijoules / 1e3

    def power_w(self) -> float | None:
        """Return the present power draw in watts; None when NVML does not report it."""
        milliwatts = _ask(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        return None if milliwatts is None else milliwatts / 1e3

    def reads_memory_of(self, other: Gpu) -> Literal["ok", "no", "unknown"]:
        """Return 'ok' or 'no': whether the driver lets this device read the memory of `other` directly. 'unknown' when
        NVML does not report it."""
        status = _ask(pynvml.nvmlDeviceGetP2PStatus, self._handle, other._handle, _P2P_READ)
        if status is None or status == pynvml.NVML_P2P_STATUS_UNKNOWN:
            return "unknown"
        return "ok" if status == pynvml.NVML_P2P_STATUS_OK else "no"

    def nvlinks(self) -> list[tuple[str | None, bool]]:
        """Return for each NVLink link (its far end, whether it is up). The far end is 'switch', a PCI address, or None
        if NVML does not report it.

        The list is empty for a GPU without NVLink.
        """
        states = {
            link: _ask(pynvml.nvmlDeviceGetNvLinkState, self._handle, link)
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
        }
        return [(self._far_end(link), bool(state)) for link, state in states.items() if state is not None]

    def _far_end(self, link: int) -> str | None:
        kind = _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, self._handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "switch"
        return _address(_ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, self._handle, link))

    @contextlib.contextmanager
    def watched_for_xid(self) -> Iterator[Callable[[], list[int]]]:
        """Yield a function to the `with` block. It returns the Xid numbers of the critical errors that the driver has
        reported since the last call, or since the block began; [] where NVML reports none."""
        events = _ask(pynvml.nvmlEventSetCreate)
        if events is None:
            yield list
            return

        def take() -> list[int]:
            seen: list[int] = []
            while len(seen) < XIDS_MAX and (event := _ask(pynvml.nvmlEventSetWait_v2, events, 0)) is not None:
                seen.append(int(event.eventData))
            return seen

        try:
            _ask(pynvml.nvmlDeviceRegisterEvents, self._handle, pynvml.nvmlEventTypeXidCriticalError, events)
            yield take
        finally:
            _ask(pynvml.nvmlEventSetFree, events)


def _ask(query: Callable[..., Any], *arguments: object) -> Any:
    """Return NVML's answer to the query; None when the driver does not have the query or refuses it."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _address(info: Any) -> str | None:
    return None if info is None else f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def pcie_link(address: str, sysfs: Path = SYSFS) -> PcieLink | None:
    """Return the present and the greatest generation and width of the PCIe link of the device at a PCI address such as
    0000:4e:00.0; None unless all four are known."""
    folder = _folder(address, sysfs)
    generation, generation_max = (_generation(folder / f"{which}_link_speed") for which in ("current", "max"))
    width, width_max = (kernel_number(folder / f"{which}_link_width") for which in ("current", "max"))
    if generation is None or generation_max is None or not width or not width_max:
        return None
    return PcieLink(generation=generation, width=width, generation_max=generation_max, width_max=width_max)


def numa_node(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of the device at a PCI address; None when the kernel does not know it (it writes -1)."""
    number = kernel_number(_folder(address, sysfs) / "numa_node")
    return number if number is not None and number >= 0 else None


def pci_path(address: str, sysfs: Path = SYSFS) -> list[str] | None:
    """Return the PCI path to the device at `address`, as NCCL names it: the address of the upstream port of each
    switch, the device's own address last. None for a device that the kernel does not know.

    A switch has two bridges on the path, its upstream and a downstream port, so every second bridge is taken.
    """
    folder = _folder(address, sysfs)
    if not folder.exists():
        return None
    ports = [part for part in folder.resolve().parts if _ADDRESS.fullmatch(part)]
    return ports[::-1][::2][::-1] or None


def nearest_nic(address: str, sysfs: Path = SYSFS) -> str | None:
    """Return the name of the network card that shares the longest PCI path with the device at `address`. Among equally
    long paths, an InfiniBand device (mlx5_0) is preferred to an Ethernet interface. None if no card shares a bridge or
    the NUMA node with the device."""
    path = _folder(address, sysfs).resolve()
    own_numa = numa_node(address, sysfs)
    best: tuple[int, int, str] | None = None
    for rank, kind in enumerate(("infiniband", "net")):
        for entry in sorted((sysfs / "class" / kind).glob("*")):
            card = entry / "device"
            if not card.exists():
                continue  # lo, bridges, veth: no hardware
            shared = _shared_parts(path, card.resolve())
            near = shared > _shared_parts(path, _root(path)) or (
                own_numa is not None and kernel_number(card / "numa_node") == own_numa
            )
            if near and (best is None or (-shared, rank) < best[:2]):
                best = (-shared, rank, entry.name)
    return best[2] if best else None


def _folder(address: str, sysfs: Path) -> Path:
    return sysfs / "bus" / "pci" / "devices" / address.lower()


def _root(path: Path) -> Path:
    """Return the host bridge above a device, as /sys/devices/pci0000:4c; `path` is the device's folder in sysfs. Two
    devices below one host bridge need not share a switch."""
    return next((parent for parent in path.parents if parent.name.startswith("pci")), path.parent)


def _shared_parts(one: Path, other: Path) -> int:
    both = zip(one.parts, other.parts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda parts: parts[0] == parts[1], both))


def _generation(file: Path) -> int | None:
    return _GENERATIONS.get((kernel_text(file) or "").split(" ", 1)[0])
