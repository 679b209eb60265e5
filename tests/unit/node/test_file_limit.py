"""A node process has as many open files as it may have, and so do its workers."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from hpctrain.base.system.kernel import MAX_OPEN_FILES

PROGRAM = """
import resource, subprocess, sys
from hpctrain.node import __main__ as node
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
node.load = lambda module: node
node.main_of_the_verb = lambda argv: subprocess.call(["sh", "-c", "ulimit -Sn; ulimit -Hn"])
node.VERBS = {{"probe": ("hpctrain.node.probe", "main_of_the_verb")}}
sys.exit(node.main(["probe"]))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 900), (900, 900)])
def test_a_node_raises_the_soft_limit_to_the_hard_one_for_itself_and_its_children(soft: int, hard: int) -> None:
    program = PROGRAM.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == [str(hard), str(hard)]


def test_the_soft_limit_is_never_lowered_and_stays_within_reason() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = "from hpctrain.base.system.kernel import raise_open_file_limit; print(raise_open_file_limit())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    expected = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    assert int(done.stdout) == max(before, expected)
