"""`python -m hpctrain.worker VERB`: starts a process that uses torch. The table `VERBS` has the module of each verb but
`fork`, the fork server (`forking`)."""

from __future__ import annotations

import signal
import sys

from hpctrain.base.errors import EXIT_USAGE, HpctrainError
from hpctrain.base.loading import load
from hpctrain.base.output_streams import timestamp_output
from hpctrain.worker import forking

VERBS = {
    "check": "hpctrain.worker.checks.check",
    "describe": "hpctrain.worker.verbs.describe",
    "eval": "hpctrain.worker.verbs.evaluate",
    "export": "hpctrain.worker.verbs.export",
    "measure": "hpctrain.worker.measure.measure",
    "torch": "hpctrain.worker.verbs.torch_state",
    "train": "hpctrain.worker.train",
}


def main(argv: list[str]) -> int:
    """Run the verb `argv[0]` with the other arguments and return its exit code. An `HpctrainError` is printed on
    stderr, and its exit code is returned."""
    if argv and argv[0] == "fork":
        return forking.main(argv[1:], _run)
    if not argv or argv[0] not in VERBS:
        print(f"usage: python -m hpctrain.worker {{fork|{'|'.join(VERBS)}}} …", file=sys.stderr)
        return EXIT_USAGE
    if argv[0] == "train":
        # This comes before torch is loaded, because its loggers keep the stderr of that moment. The output of other
        # verbs is parsed, so it gets no timestamps.
        timestamp_output()
    return _run(argv)


def _run(argv: list[str]) -> int:
    try:
        code: int = load(VERBS[argv[0]]).main(argv[1:])
    except HpctrainError as error:
        print(f"hpctrain worker: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    # Slurm signals every process of a step. The agent decides what a signal means, so workers ignore it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
