"""`python -m hpctrain.worker measure`: measured figures of each device of this machine, as one JSON object on stdout.

The figures are sustained matrix products per dtype, copy bandwidth, memory and the time of one tiny operation; for GPUs
also links, health and power. If virtual nodes share the machine, the probe lets all of them measure at the same time.
Each node reports the speed that it really gets, because rates are counted over elapsed time, including waits for a
core. A probe then lets the same processes send each other messages over the training backend.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from hpctrain.agent.worker_messages import StoreConnection
from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.net.wire import LineChannel, MalformedMessage
from hpctrain.base.system.core_sets import CORE_SETS, THREADS, take_core_set
from hpctrain.probe.faults.node_faults import CPU_QUOTA
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.probe.measure.figures import one_way_s, percentile
from hpctrain.probe.protocol import messages
from hpctrain.probe.protocol.messages import ERROR_CHARS, BackendReport, ExchangeAnswer, ExchangeOrder
from hpctrain.probe.system import host
from hpctrain.probe.system.gpu import open_nvml
from hpctrain.probe.system.powercap import RaplCounters
from hpctrain.records.topology.topology import Device, DeviceType, RatesAlone
from hpctrain.worker.measure.gpu import GpuReader, load_gpus
from hpctrain.worker.measure.rates import DeviceTimer, codec_seconds, copy_bytes_per_s, launch_seconds, matmul_flops
from hpctrain.worker.store import open_store

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALONE_S = 0.2
"""Seconds of matrix products in each dtype, and of copies, while the other devices of the node are idle."""
GO_S = 120.0
"""Seconds to wait for the next message from the probe's process on this node."""


def main(argv: list[str]) -> int:
    """Measure the devices, print the figures, and return 0. With --fd, exchange messages over that socket instead:
    send `ready`, wait for `go`, send `devices`, then answer orders to measure messages; return the exit code.

    Raises:
        InputError: `--device cuda` without --fd, and there is no CUDA device.
    """
    parser = argparse.ArgumentParser(prog="python -m hpctrain.worker measure", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="threads of a CPU device; default: torch's own choice")
    parser.add_argument("--share", type=int, default=1, help="CPU devices that share this machine's memory")
    parser.add_argument("--index", type=int, default=0, help="number of the CPU device within its node")
    parser.add_argument("--fd", type=int, help="inherited socket of the node process")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.fd is None:
        print(json.dumps(_report(device_kind(options.device), options.share, options.index).to_json()))
        return 0
    return _serve(LineChannel(socket.socket(fileno=options.fd)), options.device, options.share, options.index)


def _serve(channel: LineChannel, device: str, share: int, index: int) -> int:
    """Answer the node's process of the probe until it closes the socket. Return the exit code.

    Args:
        device: auto, cpu or cuda.
        share: number of CPU devices that share this machine's memory.
        index: number of the CPU device within its node.
    """
    try:
        kind = device_kind(device)
        if kind == "cpu" and CORE_SETS in os.environ:
            take_core_set(index)
            torch.set_num_threads(int(os.environ[THREADS]))
        # The first product loads the libraries. It comes before the common start, so that no figure contains that time.
        _warm(torch.device(kind))
        channel.send(messages.Ready(device=kind).to_json())
        message = channel.wait_message(GO_S)
        if message is None or messages.read_order(message).kind != "go":
            return HpctrainError.exit_code  # the node process gave up or is gone
        channel.send(messages.DevicesAnswer(report=_report(kind, share, index)).to_json())
        exchange = BackendMeasurement()
        while (message := channel.wait_message(GO_S)) is not None:
            channel.send(_answer(exchange, messages.read_order(message)).to_json())
    except (HpctrainError, MalformedMessage, OSError, RuntimeError, ValueError) as error:
        channel.send({"kind": "error", "text": _first_line(error)})
        return HpctrainError.exit_code
    channel.close()
    return 0


def _answer(
    exchange: BackendMeasurement, order: messages.Order
) -> messages.RendezvousAnswer | messages.ExchangeAnswer | messages.AloneAnswer:
    """Carry out an order and return the answer: measure the CPU device while the node's others are idle, open the port
    for the process group's store, or measure messages with all ranks.

    Raises:
        MalformedMessage: the order is of another kind.
    """
    if isinstance(order, messages.RendezvousOrder):
        try:
            return messages.RendezvousAnswer(port=exchange.open_rendezvous(order.addr))
        except OSError as error:
            text = f"measure: cannot listen on {order.addr}: {os.strerror(error.errno) if error.errno else error}"
            return messages.RendezvousAnswer(error=text[:ERROR_CHARS])
    if isinstance(order, messages.ExchangeOrder):
        return exchange.run(order)
    if order.kind == "alone":
        timer = DeviceTimer(torch.device("cpu"))
        flops = {name: matmul_flops(timer, dtype, ALONE_S) for name, dtype in DTYPES.items()}
        return messages.AloneAnswer(
            figures=RatesAlone(flops=flops, memory_bytes_per_s=copy_bytes_per_s(timer, ALONE_S))
        )
    raise MalformedMessage(f"it ordered {order.kind!r} of a process that measures messages")


def _report(kind: str, share: int, index: int) -> DeviceReport:
    """Return the figures of every GPU of this machine, or of one CPU device.

    Args:
        kind: cpu or cuda: the kind of devices to measure.
        share: number of CPU devices that share this machine's memory.
        index: number of the CPU device within its node.
    """
    if kind == "cpu":
        name = host.cpu_name()
        devices, types = [_measure_cpu(_slug(name), share, index)], {_slug(name): DeviceType(kind="cpu", name=name)}
    else:
        devices, types = _measure_gpus()
    between = [value for entry in devices for value in entry.copy_bytes_per_s.values()]
    intra = statistics.median(between) if between else None
    return DeviceReport(devices=devices, device_types=types, intra_bytes_per_s=intra)


def device_kind(device: str) -> Literal["cpu", "cuda"]:
    """Resolve `device` (auto, cpu or cuda) to cpu or cuda.

    Raises:
        InputError: `device` is cuda and there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here; allowed here: cpu, auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if device == "cuda" else "cpu"


def _measure_cpu(type_key: str, share: int, index: int) -> Device:
    # Free memory is read first, because a run can use the memory that the measurement takes.
    timer, memory = DeviceTimer(torch.device("cpu")), host.usable_memory_bytes() / share
    periods = host.quota_periods()
    counters, began_s = RaplCounters(), time.perf_counter()
    counters.take(began_s)
    flops = {name: matmul_flops(timer, dtype) for name, dtype in DTYPES.items()}
    held = host.is_held_by_quota(periods, host.quota_periods())
    ended_s = time.perf_counter()
    # All CPU devices share the counters of the machine.
    used_j = sum(joules for name, joules in counters.take(ended_s).items() if name.startswith("package"))
    return Device(
        id=f"cpu{index}",
        type=type_key,
        flops=flops,
        memory_bytes=float(int(memory)),
        memory_bytes_per_s=copy_bytes_per_s(timer),
        launch_s=launch_seconds(timer),
        codec_s=codec_seconds(timer),
        numa=host.own_numa_node(),
        throttle_reasons=[CPU_QUOTA] if held else [],
        ecc_errors=host.memory_errors(),
        power_w=used_j / (ended_s - began_s) if share == 1 and used_j > 0 else None,
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


TIMEOUT = timedelta(seconds=20)
"""How long a rank waits for another one in one collective."""
_MORE, _LARGER, _LAST = 0, 1, 2


class BackendMeasurement:
    """One rank's part in the measurement of messages: torch's `send` and `recv` between this node and the others.

    Every rank goes through the same rounds. In a round each rank has at most one partner: one sends a size sweep, and
    the other answers each message by a small one; then the reverse. All pairs measure at the same time, as in a
    training step.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._listener: socket.socket | None = None

    def open_rendezvous(self, addr: str) -> int:
        """Open a port for the process group's store, on this address alone, and return the port. Only rank 0, which
        serves the store, calls this method.

        Raises:
            OSError: this machine does not have the address.
        """
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        self._listener = socket.create_server((addr, 0), family=family, backlog=1024)
        port: int = self._listener.getsockname()[1]
        return port

    def run(self, order: ExchangeOrder) -> ExchangeAnswer:
        """Join the process group, measure messages with each partner and leave the group. The answer holds the
        report or the error."""
        try:
            with tempfile.TemporaryDirectory(prefix="hpctrain-nccl-") as folder:
                log = Path(folder) / "log"
                _environment(order.iface, log)
                self._join(order)
                try:
                    times = self._rounds(order.rank, order.world, order.seed)
                finally:
                    dist.destroy_process_group()
                network = messages.network_used(log.read_text(errors="replace")) if log.exists() else None
        except (RuntimeError, OSError, ValueError) as error:
            return ExchangeAnswer(error=(str(error).splitlines() or [type(error).__name__])[0][:ERROR_CHARS])
        return ExchangeAnswer(report=BackendReport(backend=order.backend, times=times, network=network))

    def _join(self, order: ExchangeOrder) -> None:
        if order.backend == "nccl":
            self._device = torch.device("cuda", 0)
            torch.cuda.set_device(self._device)
        descriptor = self._listener.detach() if self._listener is not None else None
        self._listener = None  # the next group has another store
        connection = StoreConnection(addr=order.addr, port=order.port, secret=order.token, fd=descriptor)
        dist.init_process_group(
            order.backend, store=open_store(connection, order.world, TIMEOUT), rank=order.rank,
            world_size=order.world, timeout=TIMEOUT,
            device_id=self._device if order.backend == "nccl" else None,
        )  # fmt: skip

    def _rounds(self, rank: int, world: int, seed: int) -> dict[int, tuple[tuple[int, float], ...]]:
        times = {}
        for pairs in messages.backend_rounds(world, seed):
            dist.barrier()
            for a, b in pairs:
                if rank == a:
                    times[b] = self._size_sweep(b)
                    self._echo_size_sweep(b)
                elif rank == b:
                    self._echo_size_sweep(a)
                    times[a] = self._size_sweep(a)
        dist.barrier()  # the store ends with rank 0, and late connections may still need it
        return times

    def _size_sweep(self, peer: int) -> tuple[tuple[int, float], ...]:
        """Return (bytes, one-way seconds) for messages of growing size to the peer, each answered by a small message.
        The seconds are the lower quartile of the round trips, without the answer's part.
        """
        answer = self._buffer(messages.SIZES[0])
        sweep: list[tuple[int, float]] = []
        back_s = 0.0
        start = time.perf_counter()
        for size in messages.SIZES:
            message = self._buffer(size)
            samples: list[float] = []
            warm_up = messages.warm_up_of(size)
            word = _MORE
            while word == _MORE:
                late = time.perf_counter() - start >= messages.LIMIT_S
                if len(samples) + 1 >= (messages.TIMES_MIN if late else messages.times_of(size)) + warm_up:
                    word = _LAST if late or size == messages.SIZES[-1] else _LARGER
                message[0] = word
                self._finish()
                began = time.perf_counter()
                dist.send(message, peer)
                dist.recv(answer, peer)
                self._finish()
                samples.append(time.perf_counter() - began)
            # A low percentile is used: other processes delay only some messages; the backend's time is in all of them.
            round_trip = percentile(samples[warm_up:], 0.25)
            back_s = back_s or round_trip / 2
            sweep.append((size, one_way_s(round_trip, back_s)))
            if word == _LAST:
                break
        return tuple(sweep)

    def _echo_size_sweep(self, peer: int) -> None:
        answer = self._buffer(messages.SIZES[0])
        for size in messages.SIZES:
            message = self._buffer(size)
            word = _MORE
            while word == _MORE:
                dist.recv(message, peer)
                word = int(message[0])
                dist.send(answer, peer)
            if word == _LAST:
                return

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _environment(iface: str | None, log: Path) -> None:
    """Set the network interface of gloo and NCCL, and let NCCL log to a file which network it uses. Environment
    variables that are already set stay.

    Args:
        iface: network interface for the messages; None: the backends choose.
        log: file for NCCL's messages.
    """
    if iface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", iface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", iface)
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(log))
