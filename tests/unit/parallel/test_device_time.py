"""Times on a device are taken beside its work: between two actions nobody waits for it. A stand-in for CUDA says what
was asked of it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from hpctrain.parallel import pipeline
from hpctrain.parallel.host_copy import HostCopy
from hpctrain.parallel.pipeline import PipelineInputs
from hpctrain.parallel.stage import Mark, mark, seconds_between, stopwatch
from hpctrain.parallel.tracked_work import TrackedWork

CUDA = torch.device("cuda", 0)


class Device:
    """A CUDA device with one stream; its clock stands still unless it is turned."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.waits: list[str] = []

    def synchronize(self) -> None:
        self.waits.append("stream")


class Event:
    """A CUDA event on the stream of `Device`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self, stream: Device) -> None:
        self._stream, self._at_ms = stream, stream.now_ms

    def synchronize(self) -> None:
        self._stream.waits.append("event")

    def elapsed_time(self, end: Event) -> float:
        assert self.timed
        return end._at_ms - self._at_ms


class Pinned:
    """A tensor in page-locked memory that records whether copies into it let the host go on."""

    def __init__(self, copied: list[bool]) -> None:
        self._copied = copied

    def copy_(self, source: object, non_blocking: bool) -> None:
        self._copied.append(non_blocking)

    def __float__(self) -> float:
        return 2.5


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the whole device is waited for")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    return made


def test_a_time_on_cpu_is_that_of_the_clock() -> None:
    cpu = torch.device("cpu")
    start = mark(cpu)
    assert 0 <= seconds_between(start, mark(cpu)) < 60


def test_an_action_on_cuda_is_timed_without_waiting_for_it(device: Device) -> None:
    spans: list[tuple[str, Mark, Mark]] = []
    with stopwatch(spans, "forward", CUDA, "forward stage 0 mb 0"):
        device.now_ms = 1500.0
    assert device.waits == []
    ((part, start, end),) = spans
    assert (part, seconds_between(start, end)) == ("forward_s", 1.5)
    assert device.waits == ["event"]


def test_a_number_is_read_from_the_host_copy() -> None:
    number = torch.tensor(2.5, dtype=torch.float64)
    assert HostCopy(number).value() == 2.5


def test_a_number_on_cuda_is_waited_for_by_an_event_not_by_the_stream(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []
    monkeypatch.setattr(torch, "empty_like", lambda number, device, pin_memory: Pinned(copied))
    copy = HostCopy(SimpleNamespace(device=CUDA, detach=lambda: None))  # type: ignore[arg-type]
    assert (copied, device.waits) == ([True], [])
    assert copy.value() == 2.5
    assert device.waits == ["event"]


def test_a_message_on_cuda_is_waited_for_on_the_stream_that_needs_it(device: Device) -> None:
    messages: list[Any] = [SimpleNamespace(wait=lambda: None)]
    TrackedWork(messages, "recv", None, CUDA).wait()
    assert device.waits == ["stream"]


def test_the_ends_of_a_tied_model_wait_as_long_on_cuda_as_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are left to NCCL's own watch there; a group must be told its time when it is made."""
    given: list[timedelta | None] = []
    monkeypatch.setattr(pipeline, "tie_weights", lambda *arguments: given.append(arguments[-1]))
    nothing: Any = None
    plan: Any = SimpleNamespace(stages=[])
    spec: Any = SimpleNamespace(shared_weights=lambda cuts: {})
    for kind, messages in (("cpu", timedelta(seconds=7)), ("cuda", None)):
        inputs = PipelineInputs(plan, spec, nothing, 1, 1, torch.device(kind), timeout=timedelta(seconds=7))
        assert inputs.message_timeout == messages
        pipeline._tied(inputs, SimpleNamespace(rank=0), [])  # type: ignore[arg-type]
    assert given == [timedelta(seconds=7)] * 2
