"""The devices of this node, measured by a process that holds torch; this side only starts it and reads its answer."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.base.process import Process, Runner
from hpctrain.base.wire import LineChannel, Message
from hpctrain.probe.settings import ProbeSettings
from hpctrain.records.document import Part
from hpctrain.records.topology import Device, DeviceType


class DeviceReport(Part):
    """What the measuring process found on one node."""

    devices: list[Device]
    device_types: dict[str, DeviceType]
    intra_bytes_per_s: float | None = None
    """From the first device to the second, where there are two."""


def measure_devices(
    runner: Runner, clock: Clock, log: Path, settings: ProbeSettings, barrier: Callable[[], bool]
) -> DeviceReport:
    """Start the measuring process, wait until it is ready, pass the barrier, and read its figures.

    All nodes measure at the same time: virtual nodes that share cores each report the share that they really get.

    Args:
        barrier: called when the process is ready; returns True when all nodes may start, False to give up.

    Raises:
        CommandError: the process could not start, died or took too long.
    """
    ours, theirs = socket.socketpair()
    channel = LineChannel(ours)
    deadline = clock.now() + settings.devices_deadline_s
    try:
        process = runner.start(_argv(settings, theirs.fileno()), log=log, keep_fds=(theirs.fileno(),))
    except CommandError:
        channel.close()
        raise
    finally:
        theirs.close()
    try:
        _expect("ready", channel, process, log, deadline - clock.now())
        if not barrier():
            raise CommandError("measure: the coordinator gave up before the start")
        channel.send({"kind": "go"})
        answer = _expect("devices", channel, process, log, deadline - clock.now())
        return DeviceReport.model_validate(answer["report"])
    finally:
        channel.close()
        if process.wait(1.0) is None:
            process.kill()
            process.wait()


def _argv(settings: ProbeSettings, descriptor: int) -> list[str]:
    argv = [sys.executable, "-m", "hpctrain.worker", "measure", "--device", settings.device]
    return [*argv, "--share", str(settings.share), "--fd", str(descriptor)]


def _expect(kind: str, channel: LineChannel, process: Process, log: Path, left_s: float) -> Message:
    message = channel.wait_message(max(0.001, left_s))
    if message is not None and message.get("kind") == kind:
        return message
    if message is not None and message.get("kind") == "error":
        raise CommandError(f"measure: {message.get('text')}")
    if channel.closed:
        raise CommandError(f"measure: ended with code {process.wait(1.0)}; {_last_line(log)}")
    raise CommandError(f"measure: not '{kind}' in time; {_last_line(log)}")


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it printed nothing"
