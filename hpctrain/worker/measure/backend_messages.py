"""Measures how long torch's `send` and `recv` take between this node and the others over the training backend.

Every rank goes through the same rounds. In a round each rank has one partner, and both follow the same script. All
ranks measure at once, as in a training step.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.agent.worker_messages import StoreConnection
from hpctrain.probe.measure.figures import one_way_s, percentile
from hpctrain.probe.protocol import messages
from hpctrain.probe.protocol.messages import ERROR_CHARS, BackendReport, ExchangeAnswer, ExchangeOrder
from hpctrain.worker.store import open_store

TIMEOUT = timedelta(seconds=20)
"""How long a rank waits for another one in one collective."""
_MORE, _LARGER, _LAST = 0, 1, 2


class BackendMeasurement:
    """This process's part in the measurement of messages."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._listener: socket.socket | None = None

    def open_rendezvous(self, addr: str) -> int:
        """Open a port for the store, on this address alone, and return the port. Call it on rank 0."""
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        self._listener = socket.create_server((addr, 0), family=family, backlog=1024)
        port: int = self._listener.getsockname()[1]
        return port

    def run(self, order: ExchangeOrder) -> ExchangeAnswer:
        """Join the process group, measure and leave the group. Return the report or the error."""
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
        """Return (bytes, one-way seconds) for messages of growing size to the peer, each answered by a small
        message.
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
    """Set the environment variables of a run's workers if they are not set yet, and make NCCL log which network it
    uses.
    """
    if iface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", iface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", iface)
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(log))
