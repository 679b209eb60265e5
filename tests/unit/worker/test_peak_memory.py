"""What counts as a worker's memory on a CPU."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from hpctrain.worker.build import peak_memory_bytes

SIZE = 256 << 20


def _measure(path: Path, answer: Connection) -> None:
    peaks = [peak_memory_bytes(torch.device("cpu"))]
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    mapped.max()
    peaks.append(peak_memory_bytes(torch.device("cpu")))
    filled = b"x" * SIZE
    del filled
    peaks.append(peak_memory_bytes(torch.device("cpu")))
    answer.send(peaks)


def test_memory_that_was_freed_counts_and_a_mapped_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_bytes(bytes(SIZE))
    ours, theirs = multiprocessing.Pipe()
    # The peak of a new process begins with what it holds; that of this process may be far above.
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(tmp_path / "corpus", theirs))
    process.start()
    first, mapped, filled = ours.recv()
    process.join()
    assert abs(mapped - first) < SIZE / 4
    assert filled - mapped > SIZE / 2
