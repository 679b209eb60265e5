"""What the kernel counts of this process's connections."""

from __future__ import annotations

import socket

from hpctrain.base.net.tcp_counters import tcp_counters


def test_bytes_to_another_address_are_counted_and_those_within_the_machine_are_not() -> None:
    def sent(address: str) -> int:
        return tcp_counters()[address].sent_bytes if address in tcp_counters() else 0

    before = {address: sent(address) for address in ("127.0.0.1", "127.0.0.2")}
    with socket.create_server(("127.0.0.2", 0)) as server:
        # The address 127.0.0.2 of this machine stands for another one.
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)) as here:
            there, _ = server.accept()
            with there:
                here.sendall(b"x" * 5000)
                assert len(there.recv(5000, socket.MSG_WAITALL)) == 5000
                here.sendall(b"y")  # its acknowledgement comes after that of the bytes before
                assert there.recv(1) == b"y"
                there.sendall(b"z")
                assert here.recv(1) == b"z"
                counted = tcp_counters()["127.0.0.2"]
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as here:
            there, _ = server.accept()
            with there:
                here.sendall(b"x" * 1000)
                there.recv(1000, socket.MSG_WAITALL)
                assert sent("127.0.0.2") == before["127.0.0.2"]
    assert counted.sent_bytes - before["127.0.0.2"] >= 5000
    assert counted.busy_s >= 0
