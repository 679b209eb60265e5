"""The device half: figures of the CPU, and the words over the inherited socket."""

import errno
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hpctrain.base.net.wire import LineChannel
from hpctrain.probe.measure.devices import DeviceReport
from hpctrain.worker.measure import measure
from hpctrain.worker.measure.rates import DeviceTimer, codec_seconds, copy_bytes_per_s, launch_seconds, matmul_flops


class Ticks:
    """A clock that moves by a fixed step at each look."""

    def __init__(self, step: float) -> None:
        self.time = 0.0
        self._step = step

    def __call__(self) -> float:
        self.time += self._step
        return self.time


def ticking(step: float) -> DeviceTimer:
    return DeviceTimer(torch.device("cpu"), Ticks(step))


def test_flops_are_two_size_cubed_over_elapsed_time() -> None:
    # Each product takes one second of this clock; four fit in the limit.
    assert matmul_flops(ticking(1.0), torch.float32, limit_s=4.0) == pytest.approx(2 * 512**3)


def test_a_product_slower_than_the_limit_still_counts() -> None:
    assert matmul_flops(ticking(10.0), torch.float32, limit_s=1.0) == pytest.approx(2 * 512**3 / 10)


def test_copies_count_what_is_read_and_what_is_written() -> None:
    assert copy_bytes_per_s(ticking(0.5), limit_s=1.0) == pytest.approx(2 * 64 * 2**20 / 0.5)


def test_a_tiny_operation_is_the_median_of_batches() -> None:
    assert launch_seconds(ticking(1.0)) == pytest.approx(1 / 25)


def test_a_codec_takes_so_many_seconds_for_each_number() -> None:
    # Every run of a codec on a matrix takes one second of this clock, and one is enough.
    found = codec_seconds(ticking(1.0), limit_s=0.5)
    assert list(found.model_dump().values()) == pytest.approx([1 / 2048**2] * 5)


def start(*argv: str, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "hpctrain.worker", "measure", *argv], text=True, **kwargs)


@pytest.mark.slow
def test_the_command_prints_one_json_object_and_divides_memory() -> None:
    process = start("--device", "cpu", "--threads", "1", "--share", "4", stdout=subprocess.PIPE)
    printed, _ = process.communicate(timeout=600)

    report = DeviceReport.model_validate(json.loads(printed))
    assert process.returncode == 0
    assert set(report.devices[0].flops) == {"fp32", "bf16"}
    assert report.devices[0].codec_s is not None
    import psutil

    assert report.devices[0].memory_bytes <= psutil.virtual_memory().total / 4


@pytest.mark.slow
@pytest.mark.parametrize("go", [True, False])
def test_over_a_socket_it_waits_for_the_word_and_ends_when_nobody_listens(go: bool) -> None:
    ours, theirs = socket.socketpair()
    process = start("--device", "cpu", "--fd", str(theirs.fileno()), pass_fds=[theirs.fileno()])
    theirs.close()
    channel = LineChannel(ours)

    assert channel.wait_message(120) == {"kind": "ready", "device": "cpu"}
    if go:
        channel.send({"kind": "go"})
        DeviceReport.model_validate(channel.wait_message(120)["report"])
    channel.close()
    assert process.wait(120) == (0 if go else 1)


def test_an_address_of_another_machine_is_an_error_answer_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_report", lambda *options: DeviceReport(devices=[], device_types={}))
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(measure.main, ["--device", "cpu", "--fd", str(theirs.detach())])
        channel = LineChannel(ours)
        assert channel.wait_message(120) == {"kind": "ready", "device": "cpu"}
        channel.send({"kind": "go"})
        channel.wait_message(120)
        channel.send({"kind": "rendezvous", "addr": "192.0.2.1"})  # RFC 5737: no machine has this address
        refused = channel.wait_message(120)
        channel.send({"kind": "rendezvous", "addr": "127.0.0.1"})
        answer = channel.wait_message(120)
        channel.close()
    assert refused == {
        "kind": "rendezvous",
        "error": f"measure: cannot listen on 192.0.2.1: {os.strerror(errno.EADDRNOTAVAIL)}",
    }
    assert answer is not None
    assert answer["port"] > 0
    assert done.result() == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_said() -> None:
    process = start("--device", "cuda", stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=600)

    assert process.returncode == 2
    assert "no CUDA device" in errors
