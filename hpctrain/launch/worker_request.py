"""Asks a process of `hpctrain.worker`, which may use torch, one question, and reads its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.base.process import WORKER, Runner


def worker_reply(
    verb: str, question: Mapping[str, object], runner: Runner, does: str, options: Sequence[str] = (),
    limit_s: float | None = None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Return the exit code and the answer of a new process `hpctrain.worker VERB`. If the process failed, the answer
    has the key `error` with the message.

    Args:
        verb: command of `hpctrain.worker`: eval, export, describe or torch.
        question: the request, sent as JSON.
        does: what the process does, as a verb for error messages ("exports").
        options: further words of the command line.
        limit_s: seconds that the process may take; None: no limit.

    Raises:
        HpctrainError: the process ended without an answer.
        CommandTimeoutError: the process took longer than `limit_s`.
        CommandError: the process cannot be started.
    """
    done = runner.run([*WORKER, verb, json.dumps(question), *options], timeout_s=limit_s)
    try:
        return done.code, json.loads(done.stdout)
    except json.JSONDecodeError:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise HpctrainError(f"the process that {does} ended with code {done.code}: {lines[-1]}") from None
