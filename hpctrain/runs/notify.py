"""Sends a notification when a run changes its state: an HTTP POST with JSON to the URL that `notify` in the run file
names. The URL is a secret, so no message shows it."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

from hpctrain.base.clock import Clock
from hpctrain.base.errors import HpctrainError, InputError, StorageError
from hpctrain.base.owned_files import read_private_text
from hpctrain.records.run.run import Notify, NotifyState, run_of
from hpctrain.runs.folder import RunFolder
from hpctrain.runs.locate import job_of_process

ADDRESS_BYTES_MAX = 1 << 16
"""Most bytes of the file `notify.url_file`; a larger file is refused."""
DEADLINE_S = 5.0
"""Seconds to wait for the server's answer; no longer, because a job that is about to be requeued has little time
left."""


def send_notification(
    folder: Path, attempt: int, state: NotifyState, reason: str, clock: Clock, environ: Mapping[str, str]
) -> None:
    """Send the run's new state to the URL of `notify` in the run file, if `notify.on` lists the state.

    The function raises no error and waits at most DEADLINE_S. A message that the server did not accept is recorded as
    an event.

    Args:
        folder: the run folder.
        attempt: number of the attempt.
        reason: why the state changed.
        environ: variables with the job's id, the node's name and, with `notify.url_env`, the URL.
    """
    try:
        run = run_of(folder)
    except HpctrainError:
        return  # whoever needs the run file reports the error
    notify = run.notify
    if notify is None or state not in notify.on:
        return
    message = {"run": run.name, "folder": str(folder), "state": state, "reason": reason, "attempt": attempt}
    message |= {"job_id": job_of_process(environ), "text": f"{run.name}: {state}: {reason} ({folder.name})"}
    try:
        problem = _post_with_deadline(notify_url(notify, environ), message)
    except InputError as error:
        problem = str(error)
    if problem is not None:
        node, text = environ.get("SLURMD_NODENAME", ""), f"'{state}' was not told: {problem}"
        try:
            RunFolder(folder).append_event("notify_failed", text, attempt, clock.wall(), node, state=state)
        except StorageError as error:
            # Not on stdout, where the job script reads the attempt's number.
            print(f"event not written: {error}", file=sys.stderr, flush=True)


def notify_url(notify: Notify, environ: Mapping[str, str]) -> str:
    """Return the URL to which notifications are sent, from the environment or from the file that `notify` names.

    Raises:
        InputError: the URL is missing, is no http URL, or is in a file that others can read. The message does not
            repeat the URL.
    """
    if notify.url_env is not None:
        where, text = f"notify.url_env: {notify.url_env}", environ.get(notify.url_env, "")
        if not text:
            raise InputError(f"{where} is not in the environment; export it where you submit")
    else:
        assert notify.url_file is not None, "one of the two is given"
        where = f"notify.url_file: {notify.url_file}"
        text = read_private_text(Path(notify.url_file), ADDRESS_BYTES_MAX, "notify.url_file")
    if not text.strip().startswith(("https://", "http://")):
        raise InputError(f"{where} holds no address that begins with https:// or http://")
    return text.strip()


def _post_with_deadline(address: str, message: Mapping[str, object]) -> str | None:
    """Send the message as JSON; return why the server did not accept it, None if it did. A thread sends the message, so
    that this call ends after DEADLINE_S however slow the server is."""
    outcome: list[str | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_post(address, message)), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return outcome[0] if outcome else _no_answer()


def _post(address: str, message: Mapping[str, object]) -> str | None:
    # These errors' texts may hold the address: only the system's or the server's part of them is passed on.
    try:
        body = json.dumps(message).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=DEADLINE_S):
            return None
    except urllib.error.HTTPError as error:
        return f"the server answered {error.code}"
    except TimeoutError:
        return _no_answer()
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return _no_answer()
        return (error.reason.strerror if isinstance(error.reason, OSError) else None) or "it cannot be reached"
    except OSError as error:
        return error.strerror or "the connection broke"
    except (HTTPException, ValueError):
        return "the address or the answer is no HTTP"


def _no_answer() -> str:
    return f"no answer within {DEADLINE_S:g} s"
