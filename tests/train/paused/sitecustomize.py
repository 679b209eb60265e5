"""The first generation of a run pauses before each step from a certain one on, so that a test can cause a fault long
before the last step, however few steps the run has. Each process of the run executes this file as it starts, where
PYTHONPATH names its folder."""

import sys
import time

FIRST_STEP = 12
"""A test that waits for the end of step 10 causes its fault during step 11, or in the pause behind it."""
PAUSE_S = 0.06

if "hpctrain.worker" in sys.orig_argv:
    from hpctrain.worker.loop import Loop

    def next_step(self, step=Loop.next_step):
        if self.trainer.generation == 0 and self.trainer.step + 1 >= FIRST_STEP:
            time.sleep(PAUSE_S)
        return step(self)

    Loop.next_step = next_step
