"""`python -m hpctrain.node VERB`: the process on each node of a run or a probe, and the commands that the job script
calls."""

from __future__ import annotations

import os
import signal
import sys

from hpctrain.base.errors import EXIT_USAGE, HpctrainError
from hpctrain.base.loading import load
from hpctrain.base.output_streams import escaped_output, timestamp_output
from hpctrain.base.system.kernel import raise_open_file_limit

VERBS = {
    "probe": ("hpctrain.node.probe", "main"),
    "run": ("hpctrain.node.run", "main"),
    "enter": ("hpctrain.node.enter", "main"),
    "begin": ("hpctrain.node.attempt", "begin"),
    "end": ("hpctrain.node.attempt", "end"),
    "close": ("hpctrain.node.close_lost_job", "main"),
}
"""Verb -> (module, function) that carries out the verb."""


def main(argv: list[str]) -> int:
    """Carry out the verb argv[0] and return the exit code. An HpctrainError is printed to stderr, and gives the exit
    code."""
    if not argv or argv[0] not in VERBS:
        print(f"usage: python -m hpctrain.node {{{'|'.join(VERBS)}}} …", file=sys.stderr)
        return EXIT_USAGE
    if argv[0] == "run":
        # A stop signal that arrives while the modules are still loading waits until the agent listens.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))
        timestamp_output()
    elif argv[0] in ("begin", "end") and not sys.stderr.isatty():
        # The job script reads their stdout; their stderr goes to the job's log, beside the agents' lines.
        timestamp_output(["stderr"])
    # Only the owner may read what this process and its workers write, wherever it lies.
    os.umask(0o077)
    # Workers and the processes that measure inherit the limit.
    raise_open_file_limit()
    with escaped_output():  # in an allocation (salloc) the output reaches a person's terminal
        return _run(argv)


def _run(argv: list[str]) -> int:
    try:
        module, function = VERBS[argv[0]]
        code: int = getattr(load(module), function)(argv[1:])
    except HpctrainError as error:
        print(f"hpctrain node: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
