"""`python -m hpctrain.worker train`: one rank of one generation, started and watched by its node's agent.

Exit codes: 0 done, 75 stopped at a checkpoint, 76 a peer or the network failed, 1 its own error.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import HpctrainError
from hpctrain.base.linux import name_process
from hpctrain.base.process import WORKER_NAME
from hpctrain.base.wire import LineChannel
from hpctrain.launch.code import FOLDER, code_first
from hpctrain.model.last_words import last_words, raised_by_runtime
from hpctrain.worker.build import StartOrder, build
from hpctrain.worker.loop import train
from hpctrain.worker.orders import EXIT_INFRASTRUCTURE, EXIT_RESUMABLE, Orders


def main(argv: list[str]) -> int:
    """Wait for the start order, build, train."""
    parser = argparse.ArgumentParser(prog="hpctrain.worker train")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the agent")
    parser.add_argument("--activity", type=int, required=True, help="inherited memory that tells what this rank does")
    options = parser.parse_args(argv)
    # For ps, pgrep and py-spy: workers that are forked share one command line.
    name_process(WORKER_NAME.format(os.environ.get("RANK", "?")))
    ACTIVITY.share(options.activity)
    code_first(options.folder / FOLDER)
    orders = Orders(LineChannel(socket.socket(fileno=options.fd)))
    code = _guarded(orders, options.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may still be waiting for ranks that are gone; the interpreter's own exit would wait for them.
    os._exit(code)


def _guarded(orders: Orders, folder: Path) -> int:
    try:
        return _work(orders, folder)
    except HpctrainError as error:
        if error.__cause__ is not None:  # a person's code raised it, and they want to see where
            traceback.print_exception(error.__cause__)
        print(f"hpctrain worker: {error}", file=sys.stderr)
        orders.tell("error", kind=type(error).__name__, message=str(error))
        return 1
    except (dist.DistError, RuntimeError, ConnectionError) as error:
        if not (raised_by_runtime(error) and _is_lost_peer(error)):
            return _crash(orders, error)
        message = lost(error)
        orders.tell("lost", message=message)
        print(f"hpctrain worker: lost a peer: {message}: {error}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    except (Exception, SystemExit) as error:  # the agent must hear of any other fault, whatever it is
        return _crash(orders, error)


def _work(orders: Orders, folder: Path) -> int:
    order = StartOrder.of(folder, orders.wait_start())
    orders.listen()
    trainer = build(order)
    orders.tell("ready", step=trainer.step)
    if trainer.residuals_dropped is not None:
        orders.tell("residuals_dropped", reason=trainer.residuals_dropped)
    done = train(trainer, orders)
    with ACTIVITY.doing("barrier at the end", waits=True):
        dist.barrier()
    dist.destroy_process_group()
    return 0 if done else EXIT_RESUMABLE


def lost(error: Exception) -> str:
    """Which rank was doing what when a peer or the network failed it, and the first line of what torch says."""
    now = ACTIVITY.now
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    return f"rank {rank} in step {now.step}, {now.words()}: {said}"


def _crash(orders: Orders, error: BaseException) -> int:
    traceback.print_exception(error)
    orders.tell("error", kind=type(error).__name__, message=last_words(error))
    return 1


_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out",
    "socket closed",
    "ncclremoteerror",
    "nccl error",
    "failed to recv",
    "failed to send",
)


def _is_lost_peer(error: Exception) -> bool:
    """Whether an error of the process group means that another rank or the network is gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError | ConnectionError) or any(sign in text for sign in _PEER_LOST)
