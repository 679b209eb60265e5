"""Who knows the token comes in; strangers do not, and hold up nobody."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.base.clock import SystemClock
from hpctrain.base.net.wire import LineChannel
from hpctrain.probe.protocol.connections import PeerError, ProbeListener, connect

CLOCK = SystemClock()


@pytest.fixture
def listener():
    opened = ProbeListener("127.0.0.1", "secret", CLOCK)
    yield opened
    opened.close()


def call(listener: ProbeListener, token: str, node: str = "b"):
    return connect("127.0.0.1", listener.port, token, {"kind": "join", "node": node}, 2.0, CLOCK)


def admit(listener: ProbeListener, seconds: float = 2.0):
    return listener.admit(lambda hello: hello.get("node") == "b", CLOCK.now() + seconds)


def test_who_knows_the_token_comes_in(listener: ProbeListener) -> None:
    with ThreadPoolExecutor(1) as pool:
        caller = pool.submit(call, listener, "secret")
        admitted = admit(listener)

    assert admitted is not None
    channel, hello = admitted
    assert hello["node"] == "b"
    caller.result().send({"kind": "ping"})
    assert channel.wait_message(1.0) == {"kind": "ping"}
    channel.close()
    caller.result().close()


@pytest.mark.parametrize(("token", "node"), [("guess", "b"), ("", "b"), ("secret", "other")])
def test_a_wrong_token_and_an_unexpected_node_are_refused(listener: ProbeListener, token: str, node: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        caller = pool.submit(call, listener, token, node)
        assert admit(listener, 0.5) is None
        with pytest.raises(PeerError, match="closed the connection"):
            caller.result()


def test_a_silent_stranger_holds_up_nobody(listener: ProbeListener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger, ThreadPoolExecutor(1) as pool:
        caller = pool.submit(call, listener, "secret")
        admitted = admit(listener)

        assert admitted is not None
        assert stranger.fileno() >= 0
        admitted[0].close()
        caller.result().close()


def test_nonsense_instead_of_a_hello_is_closed(listener: ProbeListener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.shutdown(socket.SHUT_WR)
        assert admit(listener, 0.5) is None
        assert b"nonce" in stranger.recv(1000)
        assert stranger.recv(100) == b""


def test_nobody_behind_the_address_is_told() -> None:
    opened = ProbeListener("127.0.0.1", "secret", CLOCK)
    port = opened.port
    opened.close()

    with pytest.raises(PeerError, match="cannot connect"):
        connect("127.0.0.1", port, "secret", {}, 1.0, CLOCK)


def test_who_took_the_port_and_does_not_know_the_token_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(1) as pool:
        caller = pool.submit(connect, "127.0.0.1", taken.getsockname()[1], "secret", {"kind": "join"}, 2.0, CLOCK)
        connection = taken.accept()[0]
        channel = LineChannel(connection)
        channel.send({"type": "challenge", "nonce": "0" * 32})
        hello = channel.wait_message(2.0)
        assert hello is not None
        assert "secret" not in str(hello)
        channel.send({"type": "welcome", "claims": {}, "proof": hello["proof"]})
        with pytest.raises(PeerError, match="does not know the token"):
            caller.result()
        channel.close()
