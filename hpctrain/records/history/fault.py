"""The table of faults: which error messages mean which fault, and what is to blame for it. Pure functions.

The parts of error messages in the table come from torch, NCCL, gloo, the CUDA runtime, the C library and hpctrain; they
are in lower case. Xids are the error numbers of NVIDIA's driver (docs.nvidia.com/deploy/xid-errors), which the driver
reports in the kernel's log and through NVML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Blame = Literal["device", "node", "network", "storage", "user"]
"""What is to blame for a fault. device: a GPU. node: another part of one node. network: the links between nodes, so no
node is to blame. storage: a file of the run, so no node is to blame. user: the program, the data or the settings of the
run."""


@dataclass(frozen=True)
class Fault:
    """One row of the table of faults: the error messages that mean the fault, and what is to blame for it."""

    name: str
    blame: Blame
    words: str
    """Description for users: 'uncorrectable memory error of a GPU'."""
    texts: tuple[str, ...] = ()
    """Parts of error messages that mean this fault, in lower case."""
    kinds: tuple[str, ...] = ()
    """Names of exception classes that mean this fault; an exception of a derived class counts, too."""
    xids: tuple[int, ...] = ()
    """Error numbers of NVIDIA's driver that mean this fault."""

    @property
    def is_infrastructure(self) -> bool:
        """Return whether nodes, the network or the storage are to blame, and not the user; the fault then does not
        count against recovery.retries."""
        return self.blame != "user"

    @property
    def names_a_node(self) -> bool:
        """Return whether the node that reports the fault is the node to blame."""
        return self.blame in ("device", "node")


EXCEPTION = "exception"
"""Name of the fault for every error that no other row of the table of faults matches."""
LOST_PEER = "lost_peer"
CHECKPOINT_DAMAGED = "checkpoint_damaged"
"""Name of the fault after which the next generation starts from an older checkpoint."""

FAULTS: tuple[Fault, ...] = (
    Fault(CHECKPOINT_DAMAGED, "storage", "a file of the checkpoint is not what was written",
          kinds=("DamagedCheckpointError",)),
    Fault("gpu_memory_error", "device", "uncorrectable memory error of a GPU",
          texts=("uncorrectable ecc error", "error_ecc_uncorrectable"), xids=(48, 63, 64, 92, 94, 95)),
    Fault("gpu_lost", "device", "a GPU has fallen off the bus",
          texts=("fallen off the bus", "gpu is lost"), xids=(79,)),
    Fault("nvlink_error", "device", "NVLink error of a GPU", texts=("uncorrectable nvlink error",), xids=(74,)),
    Fault("open_files", "node", "too many open files", texts=("too many open files",)),
    Fault("gpu_out_of_memory", "user", "out of GPU memory", kinds=("OutOfMemoryError",),
          texts=("cuda out of memory", "hip out of memory", "cuda failure 2 'out of memory'",
                 "cuda failure 'out of memory'", "cuda error: out of memory", "failed to cuda calloc",
                 "cublas_status_alloc_failed")),
    Fault("host_out_of_memory", "user", "out of host memory", kinds=("MemoryError",),
          texts=("defaultcpuallocator: can't allocate memory", "not enough memory: you tried to allocate",
                 "cannot allocate memory", "std::bad_alloc")),
    Fault("device_assert", "user", "an assertion failed on a GPU, mostly an index out of range",
          texts=("device-side assert triggered",)),
    Fault("illegal_access", "user", "illegal memory access on a GPU", xids=(13, 31),
          texts=("an illegal memory access was encountered", "misaligned address", "unspecified launch failure",
                 "an illegal instruction was encountered")),
    Fault("disk_full", "user", "no space is left on the file system",
          texts=("no space left on device", "disk quota exceeded", "no room for")),
    Fault("nccl_usage", "user", "NCCL was called in a wrong way", texts=("ncclinvalidusage", "ncclinvalidargument")),
    Fault("nccl_system_error", "network", "a system call of NCCL failed",
          texts=("ncclsystemerror", "unhandled system error")),
    Fault(LOST_PEER, "network", "contact with another rank was lost", kinds=("DistError", "ConnectionError"),
          texts=("connection closed by peer", "connection reset by peer", "connection refused", "connection timed out",
                 "connection was likely closed", "broken pipe", "timed out", "wait timeout after", "socket timeout",
                 "socket closed", "no route to host", "ncclremoteerror", "nccl error", "failed to recv",
                 "failed to send")),
    Fault("superseded", "network", "another generation began meanwhile", kinds=("Superseded",)),
    Fault(EXCEPTION, "user", "an error of the program"),
)  # fmt: skip
"""The table of faults, in order: the first row that matches an error counts. Rows of causes, such as a memory error of
a GPU, precede rows of their symptoms on other nodes, such as a lost peer."""

_BY_NAME = {fault.name: fault for fault in FAULTS}
_BY_XID = {xid: fault for fault in FAULTS for xid in fault.xids}
_XID = re.compile(r"\bNVRM: Xid \([^)]{1,40}\): (\d{1,4})\b")
_SYSTEM = frozenset(
    {"RuntimeError", "OSError", "MemoryError", "SystemError", "StorageError", "Superseded", "DamagedCheckpointError"}
)
"""Classes of the errors in which torch, NCCL, the system and hpctrain report the faults of the table, or base classes
of them. Any other error is one of the program, whatever its text: a ValueError with the text 'too many open files' is
no fault of the node."""


def fault_named(name: object) -> Fault:
    """Return the fault of this name, or the fault `exception` for any other value."""
    return _BY_NAME.get(name, _BY_NAME[EXCEPTION]) if isinstance(name, str) else _BY_NAME[EXCEPTION]


def fault_of(message: str, kinds: Sequence[str] = ()) -> Fault:
    """Return the fault that an error is classified as.

    Args:
        message: full text of the error, or a line of a log.
        kinds: names of the error's class and of all its base classes; empty for a line of a log.
    """
    if kinds and _SYSTEM.isdisjoint(kinds):
        return _BY_NAME[EXCEPTION]
    xid = xid_of(message)
    if xid is not None and xid in _BY_XID:
        return _BY_XID[xid]
    text = message.lower()
    for fault in FAULTS:
        if any(part in text for part in fault.texts) or not set(fault.kinds).isdisjoint(kinds):
            return fault
    return _BY_NAME[EXCEPTION]


def fault_of_xid(xid: int) -> Fault | None:
    """Return the fault that an error number of NVIDIA's driver means; None if the table has no row for it."""
    return _BY_XID.get(xid)


def xid_of(line: str) -> int | None:
    """Return the Xid in a line of the kernel's log, such as 79 in 'NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has …';
    None if the line has no Xid."""
    match = _XID.search(line)
    return int(match[1]) if match else None
