"""Asking a process for the sizes of a person's own model, and what is made of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hpctrain.base.errors import CommandTimeoutError, HpctrainError, InputError
from hpctrain.base.process import CommandResult, Process
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.launch.preflight import prepare
from hpctrain.launch.preflight.prepare import with_model_sizes
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.model.measured_stack import PartSizes
from hpctrain.records.run.run import Run

TOKENS, SEQ = 300, 64
SPEC = ImportedSpec(
    factory="net:make", front=["embed"], blocks="layers", back=["head"], seq_len=SEQ, tokens=TOKENS, vocab=TOKENS,
    layers=4, dim=8, weights_sha256="0" * 64,
    front_sizes=PartSizes(parameters=2400, flops=0, activation_bytes=0),
    block_sizes=PartSizes(parameters=1000, flops=9000, activation_bytes=800),
    back_sizes=PartSizes(parameters=2400, flops=7000, activation_bytes=80),
)  # fmt: skip


class Answering:
    """A runner whose process answers as it is told."""

    def __init__(self, answer: Callable[[], CommandResult]) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        self.asked.append(list(argv))
        return self.answer()

    def start(self, *_: object, **__: object) -> Process:
        raise AssertionError("nothing is to be started")


def finished(stdout: str = "", stderr: str = "", code: int = 0) -> Answering:
    return Answering(lambda: CommandResult((), code, stdout, stderr))


def run(**model: object) -> Run:
    return Run.model_validate(
        {
            "steps": 1,
            "model": {"import": "net:make", **model},
            "data": {"train": ["d"], "seq_len": SEQ},
            "batch": {"global": 4},
        }
    )


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = SpecialTokens(TOKENS, TOKENS, 0)
    monkeypatch.setattr(prepare, "special_tokens", lambda folders, objective, seq_len: tokens)


def test_the_answer_becomes_part_of_the_run(tmp_path: Path) -> None:
    runner = finished(json.dumps({"spec": SPEC.to_json()}))
    resolved, spec = with_model_sizes(run(args={"depth": 3}), runner, tmp_path)
    assert spec == SPEC
    assert resolved.spec() == SPEC
    assert Run.model_validate(resolved.to_json()) == resolved
    (argv,) = runner.asked
    assert argv[argv.index("--code") + 1] == str(tmp_path)
    question = json.loads(argv[argv.index("describe") + 1])
    assert (question["factory"], question["args"], question["tokens"]) == ("net:make", {"depth": 3}, TOKENS)


def test_what_is_known_is_not_asked_again_until_it_is_of_another_model() -> None:
    known = run(measured=SPEC.to_json())
    silent = finished()
    assert with_model_sizes(known, silent) == (known, SPEC)
    assert silent.asked == []
    for change in ({"args": {"depth": 3}}, {"blocks": "body"}, {"tensor_parallel": {"up": "columns"}}):
        runner = finished(json.dumps({"error": "asked"}))
        with pytest.raises(InputError, match="asked"):
            with_model_sizes(run(measured=SPEC.to_json(), **change), runner)


def test_a_mistake_in_the_model_is_the_person_s() -> None:
    with pytest.raises(InputError, match=r"^model\.blocks: no module 'h'$"):
        with_model_sizes(run(), finished(json.dumps({"error": "model.blocks: no module 'h'"}), code=2))


def test_a_process_that_dies_is_told_with_its_last_words() -> None:
    with pytest.raises(HpctrainError, match="net:make ended with code -9: it said nothing"):
        with_model_sizes(run(), finished(code=-9))
    with pytest.raises(HpctrainError, match="ended with code 1: MemoryError"):
        with_model_sizes(run(), finished(stderr="Traceback\nMemoryError\n", code=1))


def test_a_factory_that_never_returns_is_a_mistake() -> None:
    def never() -> CommandResult:
        raise CommandTimeoutError("python: no answer after 600 s")

    with pytest.raises(InputError, match="gave no model within 600 s"):
        with_model_sizes(run(), Answering(never))


def test_a_missing_code_folder_is_told_before_anything_runs(tmp_path: Path) -> None:
    runner = finished()
    with pytest.raises(InputError, match=r"code: .*absent: no such folder"):
        with_model_sizes(run(), runner, tmp_path / "absent")
    assert runner.asked == []
