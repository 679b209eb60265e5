"""A request to a process that holds tensors, and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.process import WORKER, Runner


def ask_worker(verb: str, question: Mapping[str, object], runner: Runner, does: str) -> dict[str, Any]:
    """Return the answer of `python -m hpctrain.worker VERB`, one JSON object.

    Args:
        does: what the process does, for errors ("exports").

    Raises:
        InputError, HpctrainError: the process reported an error, or ended without an answer.
    """
    done = runner.run([*WORKER, verb, json.dumps(question)])
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise HpctrainError(f"the process that {does} ended with code {done.code}: {said[-1]}") from None
    if "error" in answer:
        kind = InputError if done.code == InputError.exit_code else HpctrainError
        raise kind(answer["error"])
    return answer
