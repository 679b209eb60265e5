"""Starts a process that measures devices of this node with torch, and reads its answers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import model_validator

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.base.net.wire import LineChannel, Message
from hpctrain.base.process import WORKER, Runner
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.records.format.document import Part
from hpctrain.records.topology.topology import Device, DeviceType

MAX_DEVICES = 1024
"""Most devices of one node; a report with more is refused."""


class DeviceReport(Part):
    """The figures of one node's devices, as its measuring process reports them."""

    devices: list[Device]
    device_types: dict[str, DeviceType]
    """Name of a type -> type of device; `type` of a device is such a name."""
    intra_bytes_per_s: float | None = None
    """Bandwidth of copies or messages from one device of the node to another: the median over all measured pairs of
    devices; None if no pair was measured."""
    intra_alpha_s: float | None = None
    """Alpha of messages from one device of the node to another: the median over all measured pairs of CPU devices; None
    if no pair was measured."""
    notes: tuple[str, ...] = ()
    """Remarks about the measurement, each a sentence."""

    @model_validator(mode="after")
    def _figures_are_figures(self) -> DeviceReport:
        if len({device.id for device in self.devices}) < len(self.devices) or len(self.devices) > MAX_DEVICES:
            raise ValueError(f"expected: up to {MAX_DEVICES} devices of different names")
        if not {device.type for device in self.devices} <= self.device_types.keys():
            raise ValueError("a device is of a type that the report does not have")
        rates = [
            self.intra_bytes_per_s,
            self.intra_alpha_s,
            *(rate for device in self.devices for rate in _rates(device)),
        ]
        if any(rate is not None and rate <= 0 for rate in rates):
            raise ValueError("rates and times must be positive")
        return self


def _rates(device: Device) -> Iterable[float | None]:
    yield from (*device.flops.values(), *device.copy_bytes_per_s.values())
    yield from (device.memory_bytes_per_s, device.launch_s)
    yield from (device.host_to_device_bytes_per_s, device.device_to_host_bytes_per_s)
    if device.alone is not None:
        yield from (*device.alone.flops.values(), device.alone.memory_bytes_per_s)


class MeasuringProcess:
    """A process of this node that measures the node's GPUs or one of its CPU devices, and messages over the training
    backend, with torch (`hpctrain.worker measure`). It runs until the end of the probe. Always call `close`."""

    def __init__(
        self, runner: Runner, clock: Clock, log: Path, settings: ProbeSettings, index: int = 0,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start the process that measures.

        Args:
            log: file for the process's output.
            index: number of the CPU device within the node.
            env: environment variables of the process; None: those of this process.

        Raises:
            CommandError: the process could not start.
            OSError: the log cannot be opened.
        """
        self._clock = clock
        self._log = log
        ours, theirs = socket.socketpair()
        self._channel = LineChannel(ours)
        try:
            argv = _argv(settings, index, theirs.fileno())
            self._process = runner.start(argv, env=env, log=log, keep_fds=(theirs.fileno(),))
        except CommandError:
            self._channel.close()
            raise
        finally:
            theirs.close()

    def send(self, order: Message) -> None:
        """Send an order to the process; `expect` returns the answer."""
        self._channel.send(order)

    def ask(self, order: Message, limit_s: float) -> Message:
        """Send an order of the coordinator to the measuring process, and return the measuring process's answer. The
        `kind` of the answer is that of the order.

        Args:
            limit_s: seconds to wait for the answer.

        Raises:
            CommandError: the process died, took too long or reported an error.
        """
        self._channel.send(order)
        return self.expect(order["kind"], self._clock.now() + limit_s)

    def close(self) -> None:
        """End the process: close its connection, and kill it if it has not ended after a second."""
        self._channel.close()
        if self._process.wait(1.0) is None:
            self._process.kill()
            self._process.wait()

    def expect(self, kind: str, deadline: float) -> Message:
        """Return the next message of the process.

        Args:
            kind: the kind that the message must have.
            deadline: second of the clock until when to wait.

        Raises:
            CommandError: the process died, took too long, reported an error or sent another message.
        """
        message = self._channel.wait_message(max(0.001, deadline - self._clock.now()))
        if message is not None and message.get("kind") == kind:
            return message
        if message is not None and message.get("kind") == "error":
            raise CommandError(f"measure: {message.get('text')}")
        if self._channel.closed:
            raise CommandError(f"measure: ended with code {self._process.wait(1.0)}; {_last_line(self._log)}")
        raise CommandError(f"measure: not '{kind}' in time; {_last_line(self._log)}")


def _argv(settings: ProbeSettings, index: int, descriptor: int) -> list[str]:
    argv = [*WORKER, "measure", "--device", settings.device, "--index", str(index)]
    return [*argv, "--share", str(settings.share * settings.cpu_devices), "--fd", str(descriptor)]


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it printed nothing"
