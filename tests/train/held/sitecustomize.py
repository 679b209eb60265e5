"""The first generation of a run stops before a step until a file is there, so that a test can cause a fault before that
step, however fast the run and however slow the test. Each process of the run executes this file as it starts, where
PYTHONPATH names its folder.

HELD_BEFORE is the number of the step, GATE the path of the file. A test that waits for the end of the step two before
causes its fault during the step before, or while the workers are held.
"""

import os
import sys
import time
from pathlib import Path

if "hpctrain.worker" in sys.orig_argv:
    from hpctrain.worker.loop import Loop

    def next_step(self, step=Loop.next_step):
        held = self.trainer.generation == 0 and self.trainer.step + 1 >= int(os.environ["HELD_BEFORE"])
        while held and not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
        return step(self)

    Loop.next_step = next_step
