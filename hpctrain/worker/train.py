"""`python -m hpctrain.worker train`: one rank of one generation, started and watched by its node's agent.

Exit codes: 0 all steps are done, 75 stopped at a checkpoint, 76 another rank or the network failed, a later generation
has begun, or a checkpoint or the state in memory is damaged, 78 stopped after a step for another plan, 1 another error
in this rank.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hpctrain.agent.worker_messages import TEXT_CHARS, ErrorDetails, ResidualsDropped, WorkerError, WorkerReady
from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, HpctrainError
from hpctrain.base.net.wire import LineChannel
from hpctrain.base.process import WORKER_NAME
from hpctrain.base.system.kernel import set_process_name
from hpctrain.model.imported.user_error import innermost_frame, raised_in
from hpctrain.records.history.fault import EXCEPTION, Fault, fault_named, fault_of
from hpctrain.runs.code_copy import CODE_FOLDER, import_code_first
from hpctrain.worker.agent_channel import AgentChannel
from hpctrain.worker.build import build
from hpctrain.worker.loop import train
from hpctrain.worker.state_memory import MemoryUnusableError

SENTENCE_CHARS = 1000
"""Most characters of an error's message in the sentence for the user."""
_BOILERPLATE = "CUDA kernel errors might be asynchronously reported"
"""Start of the lines that torch adds to every CUDA error."""


@dataclass(frozen=True)
class Failure:
    """An error that ended a worker, with its place in the code and what is to blame."""

    kind: str
    """Name of the exception class."""
    message: str
    """The exception's message."""
    where: str | None
    """Place of the error, as '/…/code/model.py:12 in forward'; None for an `HpctrainError`, whose message is enough."""
    line: str | None
    """Number, file and text of the line of code that raised the error, for the user; None for an `HpctrainError`."""
    fault: Fault
    """Row of the fault table: what is to blame."""

    def sentence(self, at: str) -> str:
        """Return one line for the user: rank, operation, message, line of code and fault, as far as they help.

        Args:
            at: which rank failed in which operation, from `place_now`.
        """
        if self.where is None:
            return _one_line(self.message)
        if self.fault.blame == "network":
            return f"{at}: {(self.message.splitlines() or [self.kind])[0][:SENTENCE_CHARS]}"
        message = _one_line(self.message.partition(_BOILERPLATE)[0]) or "without a message"
        blamed = f" [{self.fault.words}]" if self.fault.name != EXCEPTION else ""
        return f"{at}: {self.kind}: {message} ({self.line}){blamed}"


def failure_of(error: BaseException) -> Failure:
    """Return an error's class, message, line of code and fault as a `Failure`. If torch wrapped the error, the
    wrapped error is described."""
    cause = _cause(error)
    kind, message = type(cause).__name__, str(cause).strip()[:TEXT_CHARS]
    if isinstance(cause, HpctrainError):
        # The cause of the wrapped error may be an error of the system, which says more about the fault.
        faults = [_fault_of(known) for known in (cause, cause.__cause__) if known is not None]
        return Failure(kind, message, None, None, next((row for row in faults if row.name != EXCEPTION), faults[0]))
    frame = innermost_frame(cause, "user") or innermost_frame(cause, "hpctrain") or innermost_frame(cause)
    if frame is None:
        return Failure(kind, message, "unknown", "place unknown", _fault_of(cause))
    where, line = f"{frame.filename}:{frame.lineno} in {frame.name}", f"line {frame.lineno} of {frame.filename}"
    return Failure(kind, message, where, f"{line}: {frame.line}" if frame.line else line, _fault_of(cause))


def _fault_of(error: BaseException) -> Fault:
    """Return the error's row of the fault table.

    An error that the table blames on the network, such as a time-out, gets the row `exception` (an error of the
    program) if code outside of torch and hpctrain raised it, because such an error does not show that another rank is
    lost.
    """
    fault = fault_of(str(error), [known.__name__ for known in type(error).__mro__])
    outside = raised_in(error) not in (None, "torch", "hpctrain")
    return fault_named(EXCEPTION) if fault.blame == "network" and outside else fault


def place_now() -> str:
    """Return this worker's rank and current operation, as 'rank 1 in step 3, reduce dp'."""
    now = ACTIVITY.now
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    return f"rank {rank} in step {now.step}, {now.words()}"


def _cause(error: BaseException) -> BaseException:
    """Return the error that torch wrapped, or the error itself.

    The error that torch's pipeline raises contains the arguments of a stage, but not the stage's own message.
    """
    while error.__cause__ is not None and raised_in(error) == "torch":
        error = error.__cause__
    return error


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SENTENCE_CHARS else f"{line[:SENTENCE_CHARS]} …"


def main(argv: list[str]) -> int:
    """Run one rank: wait for the start order, build the trainer, train, report every error to the agent. The
    function does not return, because it ends the process with the exit code."""
    parser = argparse.ArgumentParser(prog="hpctrain.worker train")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the agent")
    parser.add_argument("--activity", type=int, required=True, help="inherited memory that tells what this rank does")
    options = parser.parse_args(argv)
    # The name shows in ps, pgrep and py-spy: forked workers share one command line.
    set_process_name(WORKER_NAME.format(os.environ.get("RANK", "?")))
    ACTIVITY.share(options.activity)
    import_code_first(options.folder / CODE_FOLDER)
    agent_channel = AgentChannel(LineChannel(socket.socket(fileno=options.fd), strict=True, compress=True))
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
    code = train(trainer, agent_channel)
    with ACTIVITY.doing("barrier at the end", waits="world"):
        dist.barrier()
    dist.destroy_process_group()
    return code


def _leave(agent_channel: AgentChannel, error: BaseException) -> int:
    """Report to the agent why this worker ends, and return the exit code."""
    failure = failure_of(error)
    now, sentence = ACTIVITY.now, failure.sentence(place_now())
    # Without the state in memory, or without this checkpoint, the next generation starts from another one: no error of
    # the user.
    lost = failure.fault.blame in ("network", "storage") or isinstance(error, MemoryUnusableError)
    details = ErrorDetails(
        kind=failure.kind, message=failure.message, where=failure.where, step=now.step, operation=now.words()
    )
    report = WorkerError(kind="lost" if lost else "error", sentence=sentence, fault=failure.fault.name, details=details)
    if lost:
        agent_channel.send(report)
        words = f"lost a peer: {sentence}: {failure.message}" if failure.fault.blame == "network" else sentence
        print(f"hpctrain worker: {words}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    if failure.where is not None or error.__cause__ is not None:
        traceback.print_exception(error.__cause__ if failure.where is None else error)
    print(f"hpctrain worker: {sentence}", file=sys.stderr)
    agent_channel.send(report)
    return 1
