"""The queries of a probe to NVIDIA's management library (NVML), by its C interface. Types and constants are those of
NVML's public reference and header.

Nothing here changes a device. A query that the machine refuses returns None.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import byref
from typing import Literal

LIBRARY = "libnvidia-ml.so.1"

_UNCORRECTED, _VOLATILE = 1, 0
_MAX_LINKS = 18
"""NVML_NVLINK_MAX_LINKS"""
_P2P_READ = 0
_P2P_OK, _P2P_UNKNOWN = 0, 6
_XID = 0x8
"""nvmlEventTypeXidCriticalError"""
_REMOTE_SWITCH = 2

THROTTLE_REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of nvmlClocksEventReasons. 0x1, idle, is no throttling and left out."""


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t, version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _EventData(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("event_type", ctypes.c_ulonglong),
        ("event_data", ctypes.c_ulonglong),
        ("gpu_instance_id", ctypes.c_uint),
        ("compute_instance_id", ctypes.c_uint),
    )


class Gpu:
    """One GPU in NVML."""

    def __init__(self, library: Nvml, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def bus_id(self) -> str | None:
        """Return the PCI address in the kernel's form: 0000:4e:00.0."""
        info = _PciInfo()
        return _address(info) if self._library.ask("nvmlDeviceGetPciInfo_v3", self._handle, byref(info)) else None

    def pcie(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Return generation and lanes of the PCIe link now, and those that device and slot are capable of."""
        return (
            self._number("nvmlDeviceGetCurrPcieLinkGeneration"),
            self._number("nvmlDeviceGetCurrPcieLinkWidth"),
            self._number("nvmlDeviceGetMaxPcieLinkGeneration"),
            self._number("nvmlDeviceGetMaxPcieLinkWidth"),
        )

    def throttle_reasons(self) -> list[str]:
        """Return the current reasons for lowered clocks, as named in `THROTTLE_REASONS`."""
        bits = ctypes.c_ulonglong()
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            # The first name came with driver 535.
            if self._library.ask(name, self._handle, byref(bits)):
                return [word for bit, word in THROTTLE_REASONS.items() if bits.value & bit]
        return []

    def ecc_errors(self) -> int | None:
        """Return the uncorrectable memory errors since the driver was loaded; None without ECC memory."""
        count = ctypes.c_ulonglong()
        asked = (self._handle, ctypes.c_uint(_UNCORRECTED), ctypes.c_uint(_VOLATILE), byref(count))
        return count.value if self._library.ask("nvmlDeviceGetTotalEccErrors", *asked) else None

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded, in joules."""
        millijoules = ctypes.c_ulonglong()
        known = self._library.ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, byref(millijoules))
        return millijoules.value / 1e3 if known else None

    def power_w(self) -> float | None:
        """Return the current power draw in watts."""
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def reads_memory_of(self, other: Gpu) -> Literal["ok", "no", "unknown"]:
        """Return whether the driver lets this device read the other's memory directly."""
        status = ctypes.c_uint()
        asked = (self._handle, other._handle, ctypes.c_uint(_P2P_READ), byref(status))
        if not self._library.ask("nvmlDeviceGetP2PStatus", *asked) or status.value == _P2P_UNKNOWN:
            return "unknown"
        return "ok" if status.value == _P2P_OK else "no"

    def nvlinks(self) -> list[tuple[str | None, bool]]:
        """Return for each NVLink its far end ('switch', a PCI address, None if not reported) and whether it is up.

        Empty without NVLink.
        """
        found = []
        for link in range(_MAX_LINKS):
            state = ctypes.c_uint()
            if self._library.ask("nvmlDeviceGetNvLinkState", self._handle, ctypes.c_uint(link), byref(state)):
                found.append((self._far_end(link), bool(state.value)))
        return found

    def _far_end(self, link: int) -> str | None:
        kind, info, number = ctypes.c_uint(), _PciInfo(), ctypes.c_uint(link)
        known = self._library.ask("nvmlDeviceGetNvLinkRemoteDeviceType", self._handle, number, byref(kind))
        if known and kind.value == _REMOTE_SWITCH:
            return "switch"
        known = self._library.ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", self._handle, number, byref(info))
        return _address(info) if known else None

    @contextlib.contextmanager
    def watched_for_xid(self) -> Iterator[list[int]]:
        """Collect the critical errors (Xid) that the driver reports within the block; the list is filled at its end."""
        seen: list[int] = []
        events = ctypes.c_void_p()
        if not self._library.ask("nvmlEventSetCreate", byref(events)):
            yield seen
            return
        try:
            self._library.ask("nvmlDeviceRegisterEvents", self._handle, ctypes.c_ulonglong(_XID), events)
            yield seen
            data = _EventData()
            while self._library.ask("nvmlEventSetWait_v2", events, byref(data), ctypes.c_uint(0)):
                seen.append(int(data.event_data))
        finally:
            self._library.ask("nvmlEventSetFree", events)

    def _number(self, name: str) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._library.ask(name, self._handle, byref(value)) else None


class Nvml:
    """The loaded NVML library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def ask(self, name: str, *arguments: object) -> bool:
        """Call a function of NVML. Return False when the driver does not have it or it fails."""
        function = getattr(self._library, name, None)
        return function is not None and function(*arguments) == 0

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU with that UUID ('GPU-…'); None when NVML does not know it."""
        handle = ctypes.c_void_p()
        known = self.ask("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(handle))
        return Gpu(self, handle) if known else None

    def driver(self) -> str | None:
        """Return the version of the driver."""
        text = ctypes.create_string_buffer(80)
        known = self.ask("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace") or None if known else None


@contextlib.contextmanager
def open_nvml(path: str = LIBRARY) -> Iterator[Nvml | None]:
    """Open NVML for a `with` block. The value is None without the library, or when the driver does not answer."""
    try:
        nvml = Nvml(ctypes.CDLL(path))
    except OSError:
        yield None
        return
    if not nvml.ask("nvmlInit_v2"):
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")


def _address(info: _PciInfo) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
