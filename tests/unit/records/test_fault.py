"""Whose fault an error is, by the messages that torch, NCCL, gloo, CUDA and the kernel really write."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.records.history.fault import FAULTS, fault_named, fault_of, xid_of

RUNTIME = ("RuntimeError", "Exception", "BaseException", "object")
BACKEND = ("DistBackendError", "DistError", *RUNTIME)
CONNECTION = ("ConnectionResetError", "ConnectionError", "OSError", "Exception")
CUDA_TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, "


@pytest.mark.parametrize(
    ("message", "kinds", "name", "blame"),
    [
        ("CUDA error: uncorrectable ECC error encountered" + CUDA_TAIL, RUNTIME, "gpu_memory_error", "device"),
        ("CUDA error: device-side assert triggered" + CUDA_TAIL, RUNTIME, "device_assert", "user"),
        ("CUDA error: an illegal memory access was encountered" + CUDA_TAIL, RUNTIME, "illegal_access", "user"),
        ("CUDA error: unspecified launch failure" + CUDA_TAIL, RUNTIME, "illegal_access", "user"),
        ("CUDA error: out of memory" + CUDA_TAIL, RUNTIME, "gpu_out_of_memory", "user"),
        (
            "CUDA out of memory. Tried to allocate 146.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes "
            "is free.",
            ("OutOfMemoryError", *RUNTIME),
            "gpu_out_of_memory",
            "user",
        ),
        (
            "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)",
            RUNTIME,
            "host_out_of_memory",
            "user",
        ),
        ("", ("MemoryError", "Exception"), "host_out_of_memory", "user"),
        (
            NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6\n"
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
            "Last error:\nsocketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
            BACKEND,
            "nccl_system_error",
            "network",
        ),
        (
            NCCL + "remote process exited or there was a network error, NCCL version 2.26.2\nncclRemoteError: A call "
            "failed possibly due to a network error or a remote process exiting prematurely.",
            BACKEND,
            "lost_peer",
            "network",
        ),
        (
            NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            BACKEND,
            "gpu_out_of_memory",
            "user",
        ),
        (
            NCCL + "unhandled cuda error, NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 214 'uncorrectable ECC error encountered'",
            BACKEND,
            "gpu_memory_error",
            "device",
        ),
        (
            NCCL + "invalid usage, NCCL version 2.19.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
            "library.",
            BACKEND,
            "nccl_usage",
            "user",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [18.25.6.30]:28048",
            RUNTIME,
            "lost_peer",
            "network",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
            "operation to complete",
            RUNTIME,
            "lost_peer",
            "network",
        ),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for "
            "600011 milliseconds before timing out.",
            BACKEND,
            "lost_peer",
            "network",
        ),
        ("Failed to recv, got 0 bytes. Connection was likely closed.", BACKEND, "lost_peer", "network"),
        ("[Errno 104] Connection reset by peer", CONNECTION, "lost_peer", "network"),
        (f"[Errno {errno.EMFILE}] {os.strerror(errno.EMFILE)}: '/data/x'", ("OSError",), "open_files", "node"),
        ("[../gloo/transport/tcp/pair.cc:220] rv != -1. -1 vs -1. socket: Too many open files", RUNTIME, "open_files",
         "node"),
        (f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: 'x'", ("OSError",), "disk_full", "user"),
        ("mat1 and mat2 shapes cannot be multiplied (8x64 and 32x64)", RUNTIME, "exception", "user"),
        # Words of the program itself: no library raises these classes.
        ("the dialogue ends with: connection closed by peer", ("ValueError", "Exception"), "exception", "user"),
        ("'too many open files'", ("KeyError", "LookupError", "Exception"), "exception", "user"),
    ],
)  # fmt: skip
def test_errors_as_libraries_raise_them(message: str, kinds: tuple[str, ...], name: str, blame: str) -> None:
    fault = fault_of(message, kinds)
    assert (fault.name, fault.blame) == (name, blame)
    assert fault.is_infrastructure == (blame != "user")
    assert fault.names_a_node == (blame in ("device", "node"))


@pytest.mark.parametrize(
    ("line", "xid", "name"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1122, GPU has fallen off the bus.", 79, "gpu_lost"),
        ("[24128.834365] NVRM: Xid (PCI:0000:01:00): 31, Ch 00000003, engmask 00000101", 31, "illegal_access"),
        ("kernel: NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error", 94, "gpu_memory_error"),
        ("NVRM: Xid (0000:03:00): 13, Graphics Exception: ESR 0x505648=0x0", 13, "illegal_access"),
        ("NVRM: Xid (PCI:0000:41:00): 74, pid='<unknown>', NVLink: fatal error detected on link 2", 74, "nvlink_error"),
    ],
)
def test_lines_of_the_kernels_log(line: str, xid: int, name: str) -> None:
    assert xid_of(line) == xid
    assert fault_of(line).name == name


@pytest.mark.parametrize("xid", [48, 63, 64, 74, 79, 92, 94, 95])
def test_xids_of_hardware_are_the_nodes(xid: int) -> None:
    assert fault_of(f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=1, name=python").names_a_node


@pytest.mark.parametrize("xid", [13, 31])
def test_xids_of_programs_are_the_users(xid: int) -> None:
    fault = fault_of(f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=1, name=python")
    assert (fault.name != "exception", fault.blame) == (True, "user")


def test_an_xid_that_says_nothing_of_guilt_is_in_no_row() -> None:
    assert fault_of("NVRM: Xid (PCI:0000:3b:00): 43, pid=1").name == "exception"


def test_a_row_is_found_by_its_name_and_anything_else_is_an_exception() -> None:
    assert [fault_named(fault.name) for fault in FAULTS] == list(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for strange in ("gpu_memory", None, 3, ["gpu_lost"]):
        assert fault_named(strange).name == "exception"


@given(st.text(), st.lists(st.sampled_from(["RuntimeError", "ValueError", "OSError", "MemoryError", "DistError"])))
def test_any_text_has_one_row(message: str, kinds: list[str]) -> None:
    assert fault_of(message, kinds) in FAULTS
