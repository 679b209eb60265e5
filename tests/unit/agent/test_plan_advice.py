"""How often an agent asks its adviser, and what becomes of the answers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from hpctrain.agent.next_generation import LOOK_STEPS, PlanAdvice
from hpctrain.agent.worker_messages import ChangePlanOrder
from hpctrain.base.errors import InputError
from hpctrain.records.history.generation import Generation, StoreAddress

RECORD = Generation(
    number=3, attempt=0, members=[], plan="p", reason="start", store=StoreAddress(addr="::1", port=1, node="a")
)
ORDER = ChangePlanOrder(save=True)


class Thread:
    """Calls that begin, and end when a test says so."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.answer: Future[Any] = Future()

    def __call__(self, record: Generation, step: int) -> Future[Any]:
        assert record == RECORD
        self.steps.append(step)
        self.answer = Future()
        return self.answer


@pytest.fixture
def thread() -> Thread:
    return Thread()


@pytest.fixture
def advice(thread: Thread) -> PlanAdvice:
    return PlanAdvice(thread)


def test_one_question_is_asked_at_a_time_and_not_after_every_step(advice: PlanAdvice, thread: Thread) -> None:
    for step in range(1, 2 * LOOK_STEPS):
        advice.note_step(RECORD, step)
    assert (thread.steps, advice.order()) == ([1], None)
    thread.answer.set_result(None)
    assert advice.order() is None
    advice.note_step(RECORD, 2 * LOOK_STEPS)
    thread.answer.set_result(None)
    assert advice.order() is None
    for step in range(2 * LOOK_STEPS + 1, 3 * LOOK_STEPS):
        advice.note_step(RECORD, step)
    assert thread.steps == [1, 2 * LOOK_STEPS]


def test_an_order_is_given_once_and_ends_the_questions_about_a_generation(advice: PlanAdvice, thread: Thread) -> None:
    advice.note_step(RECORD, 1)
    thread.answer.set_result(ORDER)
    assert advice.order() == ORDER
    advice.note_step(RECORD, 1000)
    assert (advice.order(), thread.steps) == (None, [1])
    advice.forget()
    advice.note_step(RECORD, 1001)
    assert thread.steps == [1, 1001]


def test_an_answer_about_a_generation_that_is_over_is_dropped(advice: PlanAdvice, thread: Thread) -> None:
    advice.note_step(RECORD, 1)
    old = thread.answer
    advice.forget()
    old.set_result(ORDER)
    assert advice.order() is None


def test_an_error_of_the_adviser_is_printed_once_and_changes_nothing(
    advice: PlanAdvice, thread: Thread, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 1000, 2000):
        advice.note_step(RECORD, step)
        thread.answer.set_exception(InputError("plan.json: no such stage"))
        assert advice.order() is None
    said = capsys.readouterr().out
    assert said == "hpctrain agent: no other plan was considered: InputError: plan.json: no such stage\n"
    assert len(thread.steps) == 3


def test_an_agent_without_an_adviser_gets_no_order() -> None:
    advice = PlanAdvice(None)
    advice.note_step(RECORD, 1)
    assert advice.order() is None
