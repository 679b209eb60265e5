"""Measures a GPU: its speed, its links, and throttling, errors and power under load.

The driver reports which GPUs access each other's memory; test copies confirm it. A figure that this machine does not
give is absent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch

from hpctrain.probe.system.gpu import driver_version, find_gpu, nearest_nic, numa_node, pci_path, pcie_link
from hpctrain.records.topology.evidence import NvlinkPeer, PcieLink
from hpctrain.records.topology.topology import Device
from hpctrain.worker.measure.rates import (
    COPY_S,
    MATMUL_S,
    SUSTAINED_S,
    DeviceTimer,
    WhileBusy,
    codec_seconds,
    copy_bytes_per_s,
    launch_seconds,
    matmul_flops,
)

P2P_COPY_S = 0.1
HOST_COPY_BYTES = 256 * 2**20
P2P_COPY_BYTES = 256 * 2**20
P2p = Literal["ok", "no", "unknown"]
"""Whether a GPU accesses another GPU's memory directly."""


@dataclass
class Load:
    """Figures of a GPU under load, that is, while it multiplies matrices."""

    memory_bytes: float
    """Bytes of memory that were free before the load."""
    flops: dict[str, float] = field(default_factory=dict)
    """Dtype -> FLOP/s of matrix products."""
    throttle_reasons: set[str] = field(default_factory=set)
    """Reasons for which the GPU ran slower than it could, in NVML's words."""
    xid: int | None = None
    """The last Xid during the load; None if there was none."""
    power_w: float | None = None
    """Power during the load in watts: mean by the energy counter, else the last reading."""


class GpuReader:
    """Measures one CUDA device of this process, and reads NVML's and the kernel's reports about the device."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda{index}"
        self.timer = DeviceTimer(torch.device("cuda", index))
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        self.gpu = find_gpu(f"GPU-{uuid}") if uuid is not None else None
        self.address = (self.gpu.bus_id() if self.gpu else None) or _address_of(properties)

    def load(self) -> Load:
        """Multiply matrices of each dtype; in 16 bits long enough for heat and power limits to show. Return the
        figures."""
        load = Load(float(torch.cuda.mem_get_info(self.timer.device)[0]))
        with contextlib.ExitStack() as stack:
            take_xids = stack.enter_context(self.gpu.watched_for_xid()) if self.gpu else list
            began_s, used_j = self.timer.now(), self.gpu.energy_j() if self.gpu else None
            for name, dtype, limit_s in self._dtypes():
                load.flops[name] = matmul_flops(self.timer, dtype, limit_s, lambda: self._look(load))
            after_j = self.gpu.energy_j() if self.gpu else None
            if used_j is not None and after_j is not None:
                load.power_w = (after_j - used_j) / (self.timer.now() - began_s)
            xids = take_xids()
        load.xid = xids[-1] if xids else None
        return load

    def device(self, type_key: str, load: Load, all_readers: Sequence[GpuReader]) -> Device:
        """Measure copies and links, and return all figures of the GPU. Copies run one at a time.

        Args:
            type_key: key of the GPU's type in `topology.json`.
            load: figures of this GPU from `GpuReader.load`.
            all_readers: readers of all GPUs of the node.
        """
        links = [self._pcie(under_load=False)]
        to_device = self._host_copy(True, lambda: links.append(self._pcie(under_load=True)))
        to_host = self._host_copy(False)
        others = [reader for reader in all_readers if reader is not self]
        copies = {other.name: self._copy_to(other) for other in others}
        names = {reader.address: reader.name for reader in all_readers if reader.address}
        return Device(
            id=self.name,
            type=type_key,
            flops=load.flops,
            memory_bytes=load.memory_bytes,
            memory_bytes_per_s=copy_bytes_per_s(self.timer),
            launch_s=launch_seconds(self.timer),
            codec_s=codec_seconds(self.timer),
            pcie=next((link for link in reversed(links) if link is not None), None),
            throttle_reasons=sorted(load.throttle_reasons),
            p2p={other.name: self._reaches(other, copies[other.name] is not None) for other in others},
            nvlink=nvlink_peers(self.gpu.nvlinks(), names) if self.gpu else {},
            ecc_errors=self.gpu.ecc_errors() if self.gpu else None,
            xid=load.xid,
            power_w=load.power_w,
            driver=driver_version(),
            numa=numa_node(self.address) if self.address else None,
            nic=nearest_nic(self.address) if self.address else None,
            pci_path=pci_path(self.address) if self.address else None,
            host_to_device_bytes_per_s=to_device,
            device_to_host_bytes_per_s=to_host,
            copy_bytes_per_s={name: speed for name, speed in copies.items() if speed is not None},
        )

    def _dtypes(self) -> list[tuple[str, torch.dtype, float]]:
        with torch.cuda.device(self.timer.device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        sustained = ("bf16", torch.bfloat16, SUSTAINED_S) if native else ("fp16", torch.float16, SUSTAINED_S)
        short = [("fp32", torch.float32, MATMUL_S)]
        return [*short, ("fp16", torch.float16, MATMUL_S), sustained] if native else [*short, sustained]

    def _look(self, load: Load) -> None:
        if self.gpu is not None:
            load.throttle_reasons.update(self.gpu.throttle_reasons())
            # Without an energy counter, the last power reading is used.
            load.power_w = self.gpu.power_w() or load.power_w

    def _pcie(self, under_load: bool) -> PcieLink | None:
        """Return the PCIe link from NVML, else from the kernel, because NVML does not always have the figures; None
        if neither has.

        Args:
            under_load: whether the GPU is under load now; recorded with the figures.
        """
        link = self.gpu.pcie() if self.gpu else None
        if link is None and self.address:
            link = pcie_link(self.address)
        return link.model_copy(update={"under_load": under_load}) if link else None

    def _host_copy(self, to_device: bool, while_busy: WhileBusy | None = None) -> float:
        """Return bytes per second of copies between page-locked host memory and this GPU.

        Args:
            to_device: whether the copies go to the GPU; else they go to the host.
            while_busy: called while copies run.
        """
        here = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8, device=self.timer.device)
        host = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        source, target = (host, here) if to_device else (here, host)

        def work() -> None:
            target.copy_(source, non_blocking=True)

        with torch.cuda.device(self.timer.device):
            return self.timer.rate(work, float(HOST_COPY_BYTES), COPY_S, 4, while_busy)

    def _copy_to(self, other: GpuReader) -> float | None:
        """Return bytes per second of copies from this GPU to the other, by whatever path.

        None if other bytes arrive than were sent, which happens without an error if peer access is broken.
        """
        source = torch.arange(P2P_COPY_BYTES // 4, dtype=torch.int32, device=self.timer.device)
        target = torch.zeros_like(source, device=other.timer.device)
        speed = other.timer.rate(lambda: target.copy_(source), float(P2P_COPY_BYTES), P2P_COPY_S, 2)
        # The data is compared on the target, because a copy back would take the same path.
        expected = torch.arange(P2P_COPY_BYTES // 4, dtype=torch.int32, device=other.timer.device)
        return speed if torch.equal(target, expected) else None

    def _reaches(self, other: GpuReader, copied: bool) -> P2p:
        by_driver: P2p = self.gpu.reads_memory_of(other.gpu) if self.gpu and other.gpu else "unknown"
        return confirm_p2p(by_driver, torch.cuda.can_device_access_peer(self.timer.device, other.timer.device), copied)


def load_gpus(readers: Sequence[GpuReader]) -> list[Load]:
    """Return the figures of each GPU under load, in the order of the readers. All GPUs work at the same time, as in
    training, because they share power supplies and cooling.
    """
    with ThreadPoolExecutor(len(readers)) as pool:
        return list(pool.map(GpuReader.load, readers))


def confirm_p2p(by_driver: P2p, cuda_allows: bool, copied: bool) -> P2p:
    """Return 'no' if the driver, CUDA or a copy shows that two GPUs have no direct access to each other's memory, else
    'ok'.

    Args:
        by_driver: the driver's answer.
        cuda_allows: CUDA's answer.
        copied: whether a test copy arrived unchanged.
    """
    return "no" if by_driver == "no" or not cuda_allows or not copied else "ok"


def nvlink_peers(links: Sequence[tuple[str | None, bool]], names: dict[str, str]) -> dict[str, NvlinkPeer]:
    """Return peer -> its NVLinks. A peer is a device of the node, 'switch' or 'unknown'.

    A link that is down may not report its peer. It then counts for the only known peer, else for 'unknown'.

    Args:
        links: for each link its far end ('switch', a PCI address or None) and whether the link is up.
        names: PCI address -> device.
    """
    peers = [None if far is None else "switch" if far == "switch" else names.get(far, "unknown") for far, _ in links]
    known = {peer for peer in peers if peer is not None}
    stand_in = known.pop() if len(known) == 1 else "unknown"
    counts: dict[str, list[bool]] = {}
    for peer, (_, up) in zip(peers, links, strict=True):
        counts.setdefault(peer or stand_in, []).append(up)
    return {peer: NvlinkPeer(links=len(ups), active=sum(ups)) for peer, ups in counts.items()}


def _address_of(properties: object) -> str | None:
    """Return the PCI address from CUDA's properties; None when this version of torch does not have it."""
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if any(part is None for part in parts):
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
