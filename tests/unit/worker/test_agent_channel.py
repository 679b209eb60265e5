"""Orders of the agent reach the worker, whenever they come; without an agent the worker ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hpctrain.agent.worker_messages import ChangePlanOrder, ResidualsDropped, StartOrder, StoreConnection
from hpctrain.base.errors import EXIT_FAILED, EXIT_RESUMABLE, HpctrainError
from hpctrain.base.net.wire import LineChannel
from hpctrain.worker.agent_channel import AgentChannel, Ending

ORDER = StartOrder(plan="plan.json", rank=0, generation=0, store=StoreConnection(addr="::1", port=1, secret="s"))
START = ORDER.to_json()
STOP = {"kind": "stop"}


class Ended:
    """Stands for the end of the process, which the tests outlive."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.happened.set()


@pytest.fixture
def agent_and_orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LineChannel, AgentChannel, Ended]]:
    ended = Ended()
    monkeypatch.setattr("hpctrain.worker.agent_channel.os._exit", ended)
    ours, theirs = (LineChannel(sock, strict=True) for sock in socket.socketpair())
    orders = AgentChannel(theirs)
    yield ours, orders, ended
    ours.close()
    # A thread that still listened after the test would end the whole suite.
    if any(thread.name == "orders" for thread in threading.enumerate()):
        assert ended.happened.wait(60.0)
    theirs.close()


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds


def test_a_stop_that_came_together_with_the_start_is_heeded(
    agent_and_orders: tuple[LineChannel, AgentChannel, Ended],
) -> None:
    agent, orders, _ = agent_and_orders
    agent.send(START)
    agent.send(STOP)
    assert orders.wait_start() == ORDER
    orders.listen()
    assert soon(orders.stop_wanted)


def test_a_stop_while_the_worker_trains_is_heeded(agent_and_orders: tuple[LineChannel, AgentChannel, Ended]) -> None:
    agent, orders, ended = agent_and_orders
    agent.send(START)
    orders.wait_start()
    orders.listen()
    assert not orders.stop_wanted()
    agent.send(STOP)
    assert soon(orders.stop_wanted)
    assert not ended.happened.is_set()


def test_a_stop_counts_more_than_a_new_plan(agent_and_orders: tuple[LineChannel, AgentChannel, Ended]) -> None:
    agent, orders, _ = agent_and_orders
    agent.send(START)
    orders.wait_start()
    orders.listen()
    assert orders.ending() is Ending.NONE
    agent.send(ChangePlanOrder().to_json())
    assert soon(lambda: orders.ending() is Ending.NEW_PLAN)
    agent.send(ChangePlanOrder(save=True).to_json())
    assert soon(lambda: orders.ending() is Ending.NEW_PLAN_AND_CHECKPOINT)
    assert not orders.stop_wanted()
    agent.send(STOP)
    agent.send(ChangePlanOrder().to_json())
    assert soon(lambda: orders.ending() is Ending.STOP)


@pytest.mark.parametrize("message", [{"kind": "save"}, {"type": "stop"}, {"kind": "stop", "now": True}])
def test_an_order_that_cannot_be_read_ends_the_worker(
    agent_and_orders: tuple[LineChannel, AgentChannel, Ended],
    message: dict[str, object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    agent, orders, ended = agent_and_orders
    agent.send(START)
    orders.wait_start()
    orders.listen()
    agent.send(message)
    assert ended.happened.wait(60.0)
    assert ended.code == EXIT_FAILED
    assert "left its agent: it sent a malformed message" in capsys.readouterr().err


def test_without_an_agent_the_worker_ends(agent_and_orders: tuple[LineChannel, AgentChannel, Ended]) -> None:
    agent, orders, ended = agent_and_orders
    agent.send(START)
    orders.wait_start()
    orders.listen()
    agent.close()
    assert ended.happened.wait(60.0)
    assert ended.code == EXIT_RESUMABLE


@pytest.mark.parametrize("message", [STOP, {**START, "rank": -1}, {"kind": "start"}])
def test_without_a_start_order_there_is_no_work(
    agent_and_orders: tuple[LineChannel, AgentChannel, Ended], message: dict[str, object]
) -> None:
    agent, orders, _ = agent_and_orders
    agent.send(message)
    with pytest.raises(HpctrainError, match="no start order"):
        orders.wait_start()


def test_an_agent_that_is_held_up_gets_all_the_news_later(
    agent_and_orders: tuple[LineChannel, AgentChannel, Ended],
) -> None:
    agent, orders, _ = agent_and_orders

    def tell() -> None:
        for step in range(2000):
            orders.send(ResidualsDropped(reason=f"{step} {'x' * 200}"))

    teller = threading.Thread(target=tell)
    teller.start()
    time.sleep(0.1)
    assert teller.is_alive(), "its news fit in the socket's buffer: nothing is shown"
    told = [agent.wait_message(60.0) for _ in range(2000)]
    teller.join()
    assert [int(message["reason"].split()[0]) for message in told if message is not None] == list(range(2000))
