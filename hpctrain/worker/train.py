"""`python -m hpctrain.worker train`: one rank of one generation, started and watched by its node's agent.

Exit codes: 0 all steps are done, 75 stopped at a checkpoint, 76 another rank or the network failed, 1 an error in this
rank.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from hpctrain.agent.worker_messages import ErrorDetails, ResidualsDropped, WorkerError, WorkerReady
from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_RESUMABLE
from hpctrain.base.net.wire import LineChannel
from hpctrain.base.process import WORKER_NAME
from hpctrain.base.system.kernel import set_process_name
from hpctrain.runs.code_copy import CODE_FOLDER, import_code_first
from hpctrain.worker.agent_channel import AgentChannel
from hpctrain.worker.build import build
from hpctrain.worker.failure import failure_of, place_now
from hpctrain.worker.loop import train


def main(argv: list[str]) -> int:
    """Wait for the start order, build, train. Return the exit code."""
    parser = argparse.ArgumentParser(prog="hpctrain.worker train")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the agent")
    parser.add_argument("--activity", type=int, required=True, help="inherited memory that tells what this rank does")
    options = parser.parse_args(argv)
    # The name shows in ps, pgrep and py-spy: forked workers share one command line.
    set_process_name(WORKER_NAME.format(os.environ.get("RANK", "?")))
    ACTIVITY.share(options.activity)
    import_code_first(options.folder / CODE_FOLDER)
    agent_channel = AgentChannel(LineChannel(socket.socket(fileno=options.fd), strict=True))
    try:
        code = _work(agent_channel, options.folder)
    except (Exception, SystemExit) as error:  # the agent must learn of every error
        code = _leave(agent_channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may still wait for ranks that are gone, and a normal exit would wait for these threads.
    os._exit(code)


def _work(agent_channel: AgentChannel, folder: Path) -> int:
    start_order = agent_channel.wait_start()
    agent_channel.listen()
    trainer = build(folder, start_order)
    agent_channel.send(WorkerReady(step=trainer.step))
    if trainer.residuals_dropped is not None:
        agent_channel.send(ResidualsDropped(reason=trainer.residuals_dropped))
    done = train(trainer, agent_channel)
    with ACTIVITY.doing("barrier at the end", waits=True):
        dist.barrier()
    dist.destroy_process_group()
    return 0 if done else EXIT_RESUMABLE


def _leave(agent_channel: AgentChannel, error: BaseException) -> int:
    """Report to the agent why this worker ends, and return the exit code."""
    failure = failure_of(error)
    now, sentence = ACTIVITY.now, failure.sentence(place_now())
    lost = failure.fault.blame == "network"
    details = ErrorDetails(
        kind=failure.kind, message=failure.message, where=failure.where, step=now.step, operation=now.words()
    )
    report = WorkerError(kind="lost" if lost else "error", sentence=sentence, fault=failure.fault.name, details=details)
    if lost:
        agent_channel.send(report)
        print(f"hpctrain worker: lost a peer: {sentence}: {failure.message}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    if failure.where is not None or error.__cause__ is not None:
        traceback.print_exception(error.__cause__ if failure.where is None else error)
    print(f"hpctrain worker: {sentence}", file=sys.stderr)
    agent_channel.send(report)
    return 1
