"""`python -m hpctrain.worker measure`: what each device of this machine really does, as one JSON object on stdout.

Sustained matrix products per dtype, copy bandwidth, memory, and the cost of one tiny operation. Where virtual nodes
share the machine, all of them measure at the same time (a probe starts them together), and each reports the share that
it really gets: rates are counted over elapsed time, waits for a core included.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import time
from collections.abc import Callable

import torch

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.wire import LineChannel
from hpctrain.probe.host import cpu_name, usable_memory_bytes
from hpctrain.records.topology import Device, DeviceType

Now = Callable[[], float]

MATMUL_S = 0.7
COPY_S = 0.3
TINY_BATCHES, TINY_OPS = 40, 25
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GO_S = 120.0
"""How long to wait for the word to start."""


def main(argv: list[str]) -> int:
    """Measure and print; with --fd, over that socket: `ready`, wait for `go`, then `devices`."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.worker measure", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="threads of a CPU device; default: torch's own choice")
    parser.add_argument("--share", type=int, default=1, help="virtual nodes that share this machine's memory")
    parser.add_argument("--fd", type=int, help="inherited socket of the node process")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.fd is None:
        print(json.dumps(_report(options.device, options.share)))
        return 0
    return _serve(LineChannel(socket.socket(fileno=options.fd)), options.device, options.share)


def _serve(channel: LineChannel, device: str, share: int) -> int:
    try:
        kind = _kind(device)
        # The first product loads the libraries; that belongs to no figure and comes before the common start.
        _warm(torch.device(kind))
        channel.send({"kind": "ready"})
        message = channel.wait_message(GO_S)
        if message is None or message.get("kind") != "go":
            return HpctrainError.exit_code  # the node process gave up or is gone: nobody to measure for
        report = _report(device, share)
    except (HpctrainError, RuntimeError) as error:
        channel.send({"kind": "error", "text": str(error).splitlines()[0]})
        return HpctrainError.exit_code
    channel.send({"kind": "devices", "report": report})
    channel.close()
    return 0


def _report(device: str, share: int) -> dict[str, object]:
    """Figures of every device of the kind, in the form of topology.json."""
    kind = _kind(device)
    count = 1 if kind == "cpu" else torch.cuda.device_count()
    devices, types = [], {}
    for index in range(count):
        name = cpu_name() if kind == "cpu" else torch.cuda.get_device_name(index)
        key = _slug(name)
        types[key] = DeviceType(kind="cpu" if kind == "cpu" else "cuda", name=name)
        devices.append(_measure(torch.device(kind, index), f"{kind}{index}", key, share))
    report: dict[str, object] = {
        "devices": [entry.model_dump(mode="json", exclude_none=True) for entry in devices],
        "device_types": {key: entry.model_dump(mode="json") for key, entry in types.items()},
    }
    if count > 1:
        report["intra_bytes_per_s"] = between_bytes_per_s(time.perf_counter)
    return report


def _kind(device: str) -> str:
    """cpu or cuda.

    Raises:
        InputError: cuda is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here; allowed here: cpu, auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _measure(device: torch.device, name: str, type_key: str, share: int) -> Device:
    # Free memory is read first: what the measurement takes for itself is not gone for a run.
    memory = usable_memory_bytes() / share if device.type == "cpu" else float(torch.cuda.mem_get_info(device)[0])
    flops = {dtype: matmul_flops(device, DTYPES[dtype], time.perf_counter) for dtype in _dtypes(device)}
    return Device(
        id=name,
        type=type_key,
        flops=flops,
        memory_bytes=float(int(memory)),
        memory_bytes_per_s=copy_bytes_per_s(device, time.perf_counter),
        launch_s=launch_seconds(device, time.perf_counter),
    )


def _dtypes(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["fp32", "bf16"]
    with torch.cuda.device(device):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return ["fp32", "bf16", "fp16"] if native else ["fp32", "fp16"]


def matmul_flops(device: torch.device, dtype: torch.dtype, now: Now, limit_s: float = MATMUL_S) -> float:
    """FLOP/s of square matrix products, 2·size³ each. On CUDA fp32 means fp32, without TF32."""
    size = 512 if device.type == "cpu" else 4096 if dtype == torch.float32 else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    batch = 1 if device.type == "cpu" else 8
    return _rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, device, now, limit_s, batch)


def copy_bytes_per_s(device: torch.device, now: Now, limit_s: float = COPY_S) -> float:
    """Bytes read plus bytes written, each second, by copies that no cache holds."""
    size = 64 * 2**20 if device.type == "cpu" else min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    batch = 1 if device.type == "cpu" else 8
    return _rate(lambda: target.copy_(source), 2.0 * size, device, now, limit_s, batch)


def between_bytes_per_s(now: Now, limit_s: float = COPY_S) -> float:
    """Bytes each second from the first CUDA device to the second, however the machine carries them."""
    source = torch.ones(256 * 2**20, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    return _rate(lambda: target.copy_(source), float(source.numel()), target.device, now, limit_s, batch=4)


def launch_seconds(device: torch.device, now: Now) -> float:
    """Median time of one operation too small to matter (a sum of 8 floats), each batch waited for on CUDA."""
    x = torch.ones(8, device=device)
    samples = []
    for _ in range(TINY_BATCHES):
        start = now()
        for _ in range(TINY_OPS):
            x + x
        _finish(device)
        samples.append((now() - start) / TINY_OPS)
    return statistics.median(samples)


def _rate(
    work: Callable[[], object], amount: float, device: torch.device, now: Now, limit_s: float, batch: int
) -> float:
    """Amount of work each second over `limit_s` of elapsed time, at least one batch, after one warm-up."""
    work()
    _finish(device)
    start = now()
    done = 0
    while True:
        for _ in range(batch):
            work()
        _finish(device)
        done += batch
        spent = now() - start
        if spent >= limit_s:
            return amount * done / spent


def _finish(device: torch.device) -> None:
    """CUDA works behind the program's back: wait until it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm(device: torch.device) -> None:
    x = torch.ones(64, 64, device=device)
    (x @ x).sum().item()


def _slug(name: str) -> str:
    """A key for a file: 'NVIDIA H200' -> 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
