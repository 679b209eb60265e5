"""`python -m hpctrain.worker measure`: measured figures of each device of this machine, as one JSON object on stdout.

The figures are sustained matrix products per dtype, copy bandwidth, memory and the time of one tiny operation; for GPUs
also links, health and power. If virtual nodes share the machine, all of them measure at the same time (a probe starts
them together), and each reports the share that it really gets: rates are counted over elapsed time, including waits for
a core. A probe then lets the same processes send each other messages over the training backend.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import time

import torch

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.net.wire import LineChannel, MalformedMessage
from hpctrain.probe.faults.node_faults import CPU_QUOTA
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.protocol import messages
from hpctrain.probe.system import host
from hpctrain.probe.system.gpu import open_nvml
from hpctrain.records.topology.topology import Device, DeviceType
from hpctrain.worker.measure.backend_messages import BackendMeasurement
from hpctrain.worker.measure.gpu import GpuReader, load_gpus
from hpctrain.worker.measure.rates import DeviceTimer, codec_seconds, copy_bytes_per_s, launch_seconds, matmul_flops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GO_S = 120.0
"""Seconds to wait for the next message of the node process."""


def main(argv: list[str]) -> int:
    """Measure and print. With --fd, use the socket instead: send `ready`, wait for `go`, send `devices`, serve
    orders.
    """
    parser = argparse.ArgumentParser(prog="python -m hpctrain.worker measure", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="threads of a CPU device; default: torch's own choice")
    parser.add_argument("--share", type=int, default=1, help="virtual nodes that share this machine's memory")
    parser.add_argument("--fd", type=int, help="inherited socket of the node process")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.fd is None:
        print(json.dumps(_report(options.device, options.share).to_json()))
        return 0
    return _serve(LineChannel(socket.socket(fileno=options.fd)), options.device, options.share)


def _serve(channel: LineChannel, device: str, share: int) -> int:
    """Answer the node process until it closes the socket."""
    try:
        kind = device_kind(device)
        # The first product loads the libraries. It comes before the common start, so that no figure contains that time.
        _warm(torch.device(kind))
        channel.send(messages.Ready().to_json())
        message = channel.wait_message(GO_S)
        if message is None or messages.read_order(message).kind != "go":
            return HpctrainError.exit_code  # the node process gave up or is gone
        channel.send(messages.DevicesAnswer(report=_report(device, share)).to_json())
        exchange = BackendMeasurement()
        while (message := channel.wait_message(GO_S)) is not None:
            channel.send(_answer(exchange, messages.read_order(message)).to_json())
    except (HpctrainError, MalformedMessage, RuntimeError, ValueError) as error:
        channel.send({"kind": "error", "text": _first_line(error)})
        return HpctrainError.exit_code
    channel.close()
    return 0


def _answer(exchange: BackendMeasurement, order: messages.Order) -> messages.RendezvousAnswer | messages.ExchangeAnswer:
    """Open the port for the store, or measure messages with all ranks, as ordered."""
    if isinstance(order, messages.RendezvousOrder):
        return messages.RendezvousAnswer(port=exchange.open_rendezvous(order.addr))
    if isinstance(order, messages.ExchangeOrder):
        return exchange.run(order)
    raise MalformedMessage(f"it ordered {order.kind!r} of a process that measures messages")


def _report(device: str, share: int) -> DeviceReport:
    """Return the figures of every device of the kind `device`."""
    kind = device_kind(device)
    if kind == "cpu":
        name = host.cpu_name()
        devices, types = [_measure_cpu(_slug(name), share)], {_slug(name): DeviceType(kind="cpu", name=name)}
    else:
        devices, types = _measure_gpus()
    between = [value for entry in devices for value in entry.copy_bytes_per_s.values()]
    intra = statistics.median(between) if between else None
    return DeviceReport(devices=devices, device_types=types, intra_bytes_per_s=intra)


def device_kind(device: str) -> str:
    """Resolve `device` (auto, cpu or cuda) to cpu or cuda.

    Raises:
        InputError: `device` is cuda and there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here; allowed here: cpu, auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _measure_cpu(type_key: str, share: int) -> Device:
    # Free memory is read first, because a run can use the memory that the measurement takes.
    timer, memory = DeviceTimer(torch.device("cpu")), host.usable_memory_bytes() / share
    periods = host.quota_periods()
    began_s, used_j = time.perf_counter(), host.energy_j()
    flops = {name: matmul_flops(timer, dtype) for name, dtype in DTYPES.items()}
    held = host.is_held_by_quota(periods, host.quota_periods())
    took_s, after_j = time.perf_counter() - began_s, host.energy_j()
    # A counter that restarted in between is useless; virtual nodes share the counter of the machine.
    known = share == 1 and used_j is not None and after_j is not None and after_j > used_j
    return Device(
        id="cpu0",
        type=type_key,
        flops=flops,
        memory_bytes=float(int(memory)),
        memory_bytes_per_s=copy_bytes_per_s(timer),
        launch_s=launch_seconds(timer),
        codec_s=codec_seconds(timer),
        numa=host.own_numa_node(),
        throttle_reasons=[CPU_QUOTA] if held else [],
        ecc_errors=host.memory_errors(),
        power_w=(after_j - used_j) / took_s if known and used_j is not None and after_j is not None else None,
    )


def _measure_gpus() -> tuple[list[Device], dict[str, DeviceType]]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    with open_nvml():
        readers = [GpuReader(index) for index in range(len(names))]
        loads = load_gpus(readers)
        devices = [
            reader.device(_slug(name), load, readers) for name, reader, load in zip(names, readers, loads, strict=True)
        ]
    return devices, {_slug(name): DeviceType(kind="cuda", name=name) for name in names}


def _warm(device: torch.device) -> None:
    x = torch.ones(64, 64, device=device)
    (x @ x).sum().item()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _slug(name: str) -> str:
    """Return a device name as a key: 'NVIDIA H200' -> 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
