"""Decides which readings of a GPU during a run are a problem that people should hear of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.probe.faults.node_faults import HELD_BACK
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.fault import fault_of_xid

HELD_BACK_S = 30.0
"""Seconds for which the clocks of a GPU have to be held back without a break before it counts as a problem."""
REPORTS_MAX = 20
"""Most problems of one GPU that are reported in an attempt."""


@dataclass(frozen=True)
class GpuProblem:
    """A problem of a GPU."""

    reason: str
    """One sentence: the GPU, what is wrong, what it means, what to do."""
    data: dict[str, Any]
    """Further keys of the event `gpu_unhealthy`."""


@dataclass
class GpuHealth:
    """What is known of one GPU in an attempt. Each problem is reported once."""

    device: DeviceId
    """The GPU, as in the plan."""
    reported: int = 0
    """Number of problems that were reported."""
    xids: set[int] = field(default_factory=set)
    """Xids that were reported."""
    ecc_errors: int | None = None
    """Uncorrectable memory errors at the last reading that had a count; None before it."""
    held_back_since_s: float | None = None
    """When the clocks began to be held back; None: they are not."""
    was_throttled: bool = False
    """Whether it was reported that the clocks are held back."""

    def judge(
        self, now_s: float, throttle_reasons: Sequence[str], ecc_errors: int | None, xids: Sequence[int],
        temperature_c: float | None = None,
    ) -> list[GpuProblem]:  # fmt: skip
        """Return the problems that a reading shows for the first time.

        Args:
            now_s: a monotonic time in seconds.
            throttle_reasons: why clocks are lowered now, in NVML's words.
            ecc_errors: uncorrectable memory errors since the driver was loaded; None if unknown.
            xids: what the driver has reported since the last reading.
            temperature_c: temperature in degrees Celsius; None if unknown.
        """
        throttling = self._throttling(now_s, throttle_reasons, temperature_c)
        problems = [*self._xids(xids), *self._memory_errors(ecc_errors), *throttling]
        problems = problems[: REPORTS_MAX - self.reported]
        self.reported += len(problems)
        return problems

    def _xids(self, xids: Sequence[int]) -> Iterator[GpuProblem]:
        for xid in xids:
            if xid in self.xids:
                continue
            self.xids.add(xid)
            fault = fault_of_xid(xid)
            if fault is None:
                text, remedy = "", "look it up in NVIDIA's list of Xid errors; if it comes again, " + self._leave_out()
            elif fault.blame == "user":
                text, remedy = f" ({fault.words})", "mostly an error of the program: look at the log of its rank"
            else:
                text, remedy = f" ({fault.words})", self._leave_out()
            yield self._problem("xid", f"NVIDIA's driver reported Xid {xid}{text}; {remedy}", xid=xid)

    def _memory_errors(self, errors: int | None) -> Iterator[GpuProblem]:
        before, self.ecc_errors = self.ecc_errors, self.ecc_errors if errors is None else errors
        if errors is not None and before is not None and errors > before:
            count = errors - before
            text = (
                f"{count} uncorrectable memory error{'s' * (count > 1)}, so results may be wrong; {self._leave_out()}"
            )
            yield self._problem("ecc", text, errors=count)

    def _throttling(self, now_s: float, reasons: Sequence[str], temperature_c: float | None) -> Iterator[GpuProblem]:
        held_back = [reason for reason in reasons if reason in HELD_BACK]
        if not held_back:
            self.held_back_since_s = None
            return
        if self.held_back_since_s is None:
            self.held_back_since_s = now_s
        if self.was_throttled or now_s - self.held_back_since_s < HELD_BACK_S:
            return
        self.was_throttled = True
        at = "" if temperature_c is None else f" at {temperature_c:.0f} °C"
        text = (
            f"its clocks are held back{at} ({', '.join(held_back)}), so its ranks are slow; ask the administrators to "
            f"look at cooling and power of {self.device.node}"
        )
        yield self._problem("throttled", text, reasons=held_back)

    def _leave_out(self) -> str:
        node = self.device.node
        go_on = f"`hpctrain resubmit RUN --set cluster.exclude={node}`"
        return f"go on without the node ({go_on}), and tell the administrators"

    def _problem(self, problem: str, text: str, **data: Any) -> GpuProblem:
        names = {"node": self.device.node, "device": self.device.device, "problem": problem}
        return GpuProblem(f"{self.device}: {text}", names | data)
