"""The states that a run names are told to its address; whatever becomes of that, the run goes on and the address is
written nowhere."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_clock import FakeClock
from run_folders import RUN

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.history.run_log import Event, read_events
from hpctrain.records.run.run import Run, read_run
from hpctrain.runs import notify
from hpctrain.runs.notify import send_notification
from hpctrain.runs.secrets import check_secrets

PATH = "/api/canary"


@pytest.fixture
def heard() -> Iterator[tuple[str, list[Any]]]:
    """The address of a server, and what it was told. It answers 500 to whom it was told to refuse."""
    told: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(500 if told[-1][2]["reason"] == "refuse" else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{PATH}", told
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "notify": {"url_env": "HOOK", "on": ["done", "failed"]}}))
    return tmp_path


def told(folder: Path, state: Any, environ: dict[str, str], reason: str = "all steps are done") -> list[Event]:
    send_notification(folder, 2, state, reason, FakeClock(), {"SLURMD_NODENAME": "gpu1"} | environ)
    path = folder / "events.jsonl"
    return read_events(path) if path.exists() else []


def test_a_state_that_matters_is_told_once_with_what_a_person_wants_to_know(folder: Path, heard: Any) -> None:
    address, messages = heard
    assert told(folder, "done", {"HOOK": address, "SLURM_JOB_ID": "7"}) == []
    assert told(folder, "started", {"HOOK": address}) == []
    ((path, kind, message),) = messages
    assert (path, kind) == (PATH, "application/json")
    assert {key: message[key] for key in ("run", "state", "reason", "attempt", "job_id")} == {
        "run": "gpt", "state": "done", "reason": "all steps are done", "attempt": 2, "job_id": "7",
    }  # fmt: skip
    assert message["text"].startswith("gpt: done: all steps are done")


def test_an_address_in_a_private_file_serves_too(folder: Path, heard: Any) -> None:
    address, messages = heard
    (folder / "hook").write_text(f"{address}\n")
    (folder / "hook").chmod(0o600)
    (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, "notify": {"url_file": "hook"}}))
    assert told(folder, "failed", {}) == []
    assert messages[0][2]["state"] == "failed"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}{PATH}"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (None, "notify.url_env: HOOK is not in the environment"),
        ("canary", "holds no address that begins with https:// or http://"),
        ("http://127.0.0.1:port/canary", "the address or the answer is no HTTP"),
        ("http://[canary/", "the address or the answer is no HTTP"),
        (closed_port, "Connection refused"),
    ],
)
def test_what_was_not_told_is_an_event_without_the_address(folder: Path, address: Any, said: str) -> None:
    text = address() if callable(address) else address
    (event,) = told(folder, "done", {} if text is None else {"HOOK": text})
    assert (event.kind, event.node, event.attempt) == ("notify_failed", "gpu1", 2)
    assert said in event.reason
    assert "canary" not in (folder / "events.jsonl").read_text()


def test_a_server_that_refuses_is_an_event(folder: Path, heard: Any) -> None:
    (event,) = told(folder, "failed", {"HOOK": heard[0]}, "refuse")
    assert event.reason == "'failed' was not told: the server answered 500"


def test_a_server_that_never_answers_is_waited_for_no_longer_than_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "DEADLINE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        (event,) = told(folder, "done", {"HOOK": f"http://127.0.0.1:{deaf.getsockname()[1]}{PATH}"})
    assert event.reason == "'done' was not told: no answer within 0.2 s"


def test_a_run_without_an_address_and_one_whose_file_is_broken_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    assert told(tmp_path, "done", {}) == []
    (tmp_path / "run.yaml").write_text("steps: [")
    assert told(tmp_path, "done", {}) == []


@pytest.mark.parametrize(
    "given", [{}, {"url_env": "A", "url_file": "b"}, {"url_env": "not a name"}, {"url": "https://x"}]
)
def test_the_key_takes_one_name_and_no_address(tmp_path: Path, given: dict[str, str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "notify": given}))
    with pytest.raises(FileError):
        read_run(tmp_path / "run.yaml")


def test_an_address_that_is_not_there_is_told_before_the_run_starts() -> None:
    run = Run.model_validate({**RUN, "notify": {"url_env": "HOOK"}})
    with pytest.raises(InputError, match=r"notify\.url_env: HOOK is not in the environment; export it"):
        check_secrets(run, {})
    check_secrets(run, {"HOOK": "https://example.org/x"})
