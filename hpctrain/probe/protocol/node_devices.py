"""Measures the devices of one node: all GPUs by one process, or each device of a CPU node by a process of its own."""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import CommandError
from hpctrain.base.net.wire import Message
from hpctrain.base.process import Runner
from hpctrain.base.system.core_sets import CoreSet, core_set_environment, overlap
from hpctrain.probe.measure.devices import DeviceReport, MeasuringProcess
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.protocol.messages import (
    AloneAnswer,
    ExchangeAnswer,
    ExchangeOrder,
    Ready,
    RendezvousAnswer,
    RendezvousOrder,
    backend_lines,
)
from hpctrain.probe.system.host import interface_of
from hpctrain.records.topology.topology import RatesAlone

ALONE_SHARE = 0.5
"""Share of the deadline after which no further device is measured alone."""


class NodeDevices:
    """The measuring processes of one node. The first one also measures messages to other nodes. Always call `close`."""

    def __init__(
        self, runner: Runner, clock: Clock, log: Path, settings: ProbeSettings, addr: str, sets: Sequence[CoreSet]
    ) -> None:
        """Start the processes: one for each CPU device that the settings ask for.

        Args:
            log: file for the output of the processes.
            addr: address of this node.
            sets: the core sets of the CPU devices; empty if they are not known.

        Raises:
            CommandError: a process could not start.
            OSError: the log cannot be opened.
        """
        self._clock, self._settings, self._addr, self._sets = clock, settings, addr, sets
        self._processes: list[MeasuringProcess] = []
        env = dict(os.environ) | core_set_environment(settings.cpu_devices, sets, os.environ)
        try:
            for index in range(settings.cpu_devices):
                self._processes.append(MeasuringProcess(runner, clock, log, settings, index, env))
        except (CommandError, OSError):
            self.close()
            raise

    def measure(self, barrier: Callable[[], bool]) -> DeviceReport:
        """Wait until all processes are ready, call `barrier`, and return the figures of the node's devices.

        All nodes, and all devices of a node, measure at the same time, as they compute at the same time in a training
        step. So those that share processor cores or memory each report the speed that they get beside the others. Then
        the devices of a CPU node measure one after the other, and messages to each other.

        Args:
            barrier: called when all processes are ready; returns True when all nodes may start, False to give up.

        Raises:
            CommandError: the coordinator gave up, or a process died, took too long or reported an error.
            ValidationError: a process's answer is not valid (pydantic).
        """
        limit_s = self._settings.devices_deadline_s
        deadline = self._clock.now() + limit_s
        kinds = [Ready.model_validate(process.expect("ready", deadline)).device for process in self._processes]
        if kinds[0] == "cuda":
            self._close_others()
        if not barrier():
            raise CommandError("measure: the coordinator gave up before the start")
        started = self._clock.now()
        answers = self._ask_all([{"kind": "go"}] * len(self._processes), "devices", started + limit_s)
        reports = [DeviceReport.model_validate(answer.get("report")) for answer in answers]
        if len(reports) == 1:
            return reports[0]
        alone = [self._alone(process, started + ALONE_SHARE * limit_s) for process in self._processes]
        devices = [
            report.devices[0].model_copy(update={"alone": figures})
            for report, figures in zip(reports, alone, strict=True)
        ]
        merged = DeviceReport(devices=devices, device_types=reports[0].device_types, notes=self._remarks())
        return self._with_messages(merged)

    def ask(self, order: RendezvousOrder | ExchangeOrder, limit_s: float) -> Message:
        """Pass an order of the coordinator to the first process, and return the answer.

        Args:
            limit_s: seconds to wait for the answer.

        Raises:
            CommandError: the process died, took too long or reported an error.
        """
        return self._processes[0].ask(order.to_json(), limit_s)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()
        self._processes = []

    def _close_others(self) -> None:
        """End all processes but the first, because the node has GPUs, which the first measures."""
        for process in self._processes[1:]:
            process.close()
        del self._processes[1:]

    def _ask_all(self, orders: Sequence[Message], kind: str, deadline: float) -> list[Message]:
        """Send each process its order, and return the answers, which are of this kind."""
        for process, order in zip(self._processes, orders, strict=True):
            process.send(order)
        return [process.expect(kind, deadline) for process in self._processes]

    def _alone(self, process: MeasuringProcess, until: float) -> RatesAlone | None:
        """Return the figures of a device while the others are idle; None if it is later than `until`."""
        now = self._clock.now()
        if now >= until:
            return None
        return AloneAnswer.model_validate(process.ask({"kind": "alone"}, until - now + ALONE_LIMIT_S)).figures

    def _with_messages(self, report: DeviceReport) -> DeviceReport:
        """Return the report with bandwidth and alpha of messages between the node's devices over gloo, the backend of
        a training on CPUs; with a note if they could not be measured."""
        deadline = self._clock.now() + self._settings.backend_deadline_s
        opened = RendezvousAnswer.model_validate(self.ask(RendezvousOrder(addr=self._addr), ALONE_LIMIT_S))
        if opened.port is None:
            return _noted(report, f"messages between its devices were not measured: {opened.error}")
        token, iface = secrets.token_hex(16), interface_of(self._addr)
        orders = [
            ExchangeOrder(
                kind="exchange", backend="gloo", world=len(self._processes), rank=rank, seed=self._settings.seed,
                addr=self._addr, port=opened.port, token=token, iface=iface,
            ).to_json()
            for rank in range(len(self._processes))
        ]  # fmt: skip
        answers = [ExchangeAnswer.model_validate(answer) for answer in self._ask_all(orders, "exchange", deadline)]
        names = [device.id for device in report.devices]
        measured = {name: answer.report for name, answer in zip(names, answers, strict=True) if answer.report}
        lines = [figures for _, figures in backend_lines(names, measured).values()]
        if len(measured) < len(names) or not lines:
            why = next((answer.error for answer in answers if answer.error), "their times do not grow with the size")
            return _noted(report, f"messages between its devices were not measured: {why}")
        rates = {
            "intra_bytes_per_s": 1.0 / statistics.median(figures.beta_s_per_byte for figures in lines),
            "intra_alpha_s": statistics.median(figures.alpha_s for figures in lines) or None,
        }
        return report.model_copy(update=rates)

    def _remarks(self) -> tuple[str, ...]:
        count = len(self._processes)
        if not self._sets:
            return (f"its {count} devices share all CPUs, because Slurm did not say which CPUs are the job's",)
        if overlap(self._sets):
            cpus = len({cpu for cpus in self._sets for cpu in cpus})
            return (f"{cpus} CPU{'' if cpus == 1 else 's'} for {count} devices: several devices have the same CPU",)
        return ()


ALONE_LIMIT_S = 20.0
"""Seconds for which a process may measure one device alone, or open a port."""


def _noted(report: DeviceReport, note: str) -> DeviceReport:
    return report.model_copy(update={"notes": (*report.notes, note)})
