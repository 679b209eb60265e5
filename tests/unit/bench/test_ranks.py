"""The processes that a bench starts together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = """
import os, signal, sys, time
from pathlib import Path
from hpctrain.bench.ranks import run_ranks

def body(rank, world, folder):
    (folder / f"{rank}.new").write_text(str(os.getpid()))
    (folder / f"{rank}.new").rename(folder / f"{rank}.pid")
    time.sleep(3600)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # as the command line does
    run_ranks(body, 2, Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_bench_that_sigterm_ends_leaves_no_process(tmp_path: Path) -> None:
    program = tmp_path / "bench.py"
    program.write_text(BENCH)
    bench = subprocess.Popen([sys.executable, str(program), str(tmp_path)])
    try:
        while len(ranks := list(tmp_path.glob("*.pid"))) < 2:
            assert bench.poll() is None
            time.sleep(0.1)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(300) == 1
        for rank in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(int(rank.read_text()), 0)
    finally:
        bench.kill()
