"""What is said of memory is what was taken, by this process and by the largest that it started."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, subprocess, sys
from hpctrain.corpus.prepare.pool import peak_memory

def take(size_mb):
    subprocess.run([sys.executable, "-c", f"b'x' * ({size_mb} << 20)"], check=True)

alone = peak_memory()
take(60)
take(120)
after = peak_memory()
held = b"x" * (100 << 20)
del held
print(json.dumps([*alone, *after, *peak_memory()]))
"""


def test_the_peak_is_of_this_process_and_of_its_largest_child() -> None:
    # Much memory in this process would count as its child's: what it was before it loaded its program.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=600)
    own, child, own_after, largest, own_later, _ = json.loads(done.stdout)
    mib = 1 << 20
    assert child == 0
    assert 120 * mib < largest < 180 * mib
    assert own_after < own + 20 * mib
    assert own_later > 100 * mib
