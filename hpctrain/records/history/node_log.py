"""The log of the nodes: metrics-nodes.jsonl has the energy that each node used, and the state of its GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.file_tail import rows_of
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.format.node_name import DeviceId

NODE_LOG = "metrics-nodes.jsonl"
"""Name of the file in a run folder."""

Joules = Annotated[float, Field(ge=0, le=1e12)]


class GpuFigures(Part):
    """What a GPU did in the seconds of a row. A figure that its driver does not give is absent."""

    device: str
    """Name of the GPU within its node, as in the plan: cuda0."""
    address: str
    """PCI address of the GPU within its machine: 0000:4e:00.0."""
    energy_j: Joules | None = None
    """Energy in joules: by the GPU's counter, else the integral of its power readings."""
    power_w: float | None = Field(default=None, ge=0)
    """Mean of the power readings in watts."""
    use: float | None = Field(default=None, ge=0, le=1)
    """Share of the time in which a kernel ran on the GPU, as the mean of the driver's readings."""
    temperature_c: float | None = None
    """Highest temperature in degrees Celsius."""
    sm_clock_hz: float | None = Field(default=None, ge=0)
    """Mean clock of the multiprocessors in hertz."""
    memory_clock_hz: float | None = Field(default=None, ge=0)
    """Mean clock of the memory in hertz."""
    throttle_reasons: list[str] | None = None
    """Why clocks were lowered, in NVML's words, as seen in any reading; absent if they were not."""
    ecc_corrected: int | None = Field(default=None, ge=0)
    """Memory errors that the hardware corrected, since the driver was loaded."""
    ecc_uncorrected: int | None = Field(default=None, ge=0)
    """Uncorrectable memory errors since the driver was loaded."""
    xids: list[int] | None = None
    """Error numbers (Xid) that NVIDIA's driver reported for the GPU; absent without any."""


class NodeRow(Document):
    """A line of metrics-nodes.jsonl: the energy that a node used in some seconds, and the state of its GPUs.

    The lines of a node follow each other without gaps as long as its agent lives. Energy is that of the whole machine,
    also for jobs that share it.
    """

    schema_kind: ClassVar[str] = "node_metric"

    time_s: float
    """End of the seconds that the line is about, in seconds since 1970."""
    seconds: float = Field(gt=0, le=1e7)
    """How many seconds before `time_s` the line is about."""
    attempt: int
    """Number of the attempt."""
    node: str
    """Name of the node."""
    machine: str
    """Name of the machine that the node is on. Virtual nodes share a machine and its counters."""
    cpu_j: dict[str, Joules] | None = None
    """RAPL domain -> energy in joules: package-0 (a processor), dram-0 (its memory), psys (the whole machine). A domain
    that cannot be read is absent."""
    gpus: list[GpuFigures] | None = None
    """The GPUs of the node that the plan may use; absent without GPUs or without NVML."""

    def host_j(self) -> float | None:
        """Return the joules of the machine without its GPUs; None if no counter could be read.

        It is the sum over processors and their memory. A machine without GPUs counts by psys instead, if psys counted
        at least as much, because psys includes processors, memory and more.
        """
        domains = self.cpu_j or {}
        parts = [joules for name, joules in domains.items() if name != "psys"]
        whole = domains.get("psys")
        if whole is not None and not self.gpus and whole >= sum(parts):
            return whole
        return sum(parts) if parts else None

    def device_id(self, gpu: GpuFigures) -> DeviceId:
        """Return the name of one of `gpus` as in the plan: node:device."""
        return DeviceId.of(self.node, gpu.device)


def read_node_log(folder: Path) -> list[NodeRow]:
    """Return the rows of metrics-nodes.jsonl in a run folder, in file order; [] without the file. Lines that are
    incomplete, or that this version of hpctrain cannot read, are left out.

    Raises:
        FileError: the file cannot be read.
        UntrustedError: the file or its folder belongs to somebody else, or others can write to it.
    """
    return list(rows_of(NodeRow, read_jsonl(folder / NODE_LOG)))
