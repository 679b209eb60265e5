"""How a process that holds tensors answers, whatever it was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.base.errors import InputError
from hpctrain.worker.verbs.json_reply import json_reply


def test_an_answer_and_a_known_error_are_json(capfd: pytest.CaptureFixture[str]) -> None:
    def refuse() -> dict[str, object]:
        raise InputError("data: none")

    assert json_reply(lambda: {"sets": 1}) == 0
    assert json_reply(refuse) == InputError.exit_code
    out, err = capfd.readouterr()
    # The second answer finds stdout where the first one put it, beside stderr.
    assert json.loads(out) == {"sets": 1}
    assert json.loads(err) == {"error": "data: none"}


def test_a_reply_that_json_cannot_hold_leaves_no_half_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert json_reply(lambda: {"loss": 1.0, "worst": float("nan")}) == 1
    assert "not JSON compliant" in json.loads(capfd.readouterr().out)["error"]


def test_an_error_of_a_persons_code_is_told_with_its_place(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def make():\n    raise KeyError('gone')\n")
    mine: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), mine)
    assert json_reply(mine["make"]) == 1  # type: ignore[arg-type]
    out, err = capfd.readouterr()
    assert json.loads(out) == {"error": f"KeyError: 'gone' (line 2 of {path}: raise KeyError('gone'))"}
    assert "Traceback" in err
