"""A command that SIGTERM ends says so, and ends what it had begun."""

from __future__ import annotations

import subprocess
import sys

ENDED = """
import os, signal
import hpctrain.cli.main as command_line

def begun():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("tidied", flush=True)

command_line._run = begun
command_line.main()
"""


def test_a_command_that_sigterm_ends_says_so_in_one_line():
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("tidied\n", "hpctrain: ended by SIGTERM\n", 1)
