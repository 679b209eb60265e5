"""Runs on the lab that a test ends by itself train slowly: they would need all processors of this machine meanwhile,
for which Slurm's daemons and other tests wait. So does the first generation of a run in whose environment is
PACED_AT_FIRST: a test disturbs it before it is done. Python imports this module as it starts, where PYTHONPATH names
its folder."""

import os
import sys
import time

PAUSE_S = 0.2
"""Before each step."""
ENDLESS = 1_000_000
"""Steps of such a run, or more."""

if "hpctrain.worker" in sys.orig_argv:
    from hpctrain.base import loading

    def load_paced(module, load=loading.load):
        loaded = load(module)
        if module == "hpctrain.worker.train":
            pace(load("hpctrain.worker.loop").Loop)
        return loaded

    def pace(loop):
        def next_step(self, step=loop.next_step):
            first = self.trainer.generation == 0 and "PACED_AT_FIRST" in os.environ
            if first or self.trainer.run.steps >= ENDLESS:
                time.sleep(PAUSE_S)
            return step(self)

        loop.next_step = next_step

    loading.load = load_paced
