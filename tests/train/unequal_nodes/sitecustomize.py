"""The forward pass of a micro-batch takes a stated time on each node, most of which the worker sleeps, so that speeds
hardly depend on what else this machine does. Each process of the run executes this file as it starts, where PYTHONPATH
names its folder.

FORWARD_S is a JSON object: node -> seconds that a forward pass takes longer.
"""

import json
import os
import sys
import time

if "hpctrain.node" in sys.orig_argv and "--node" in sys.orig_argv:
    os.environ["FORWARD_NODE"] = sys.orig_argv[sys.orig_argv.index("--node") + 1]
if "hpctrain.worker" in sys.orig_argv:
    from torch.distributed.pipelining import PipelineStage

    def slow_down(stage):
        seconds = json.loads(os.environ["FORWARD_S"])[os.environ["FORWARD_NODE"]]

        def forward_one_chunk(self, *args, forward=stage.forward_one_chunk, **kwargs):
            time.sleep(seconds)
            return forward(self, *args, **kwargs)

        stage.forward_one_chunk = forward_one_chunk

    slow_down(PipelineStage)
