"""A run whose ports are crowded with connections that are reset or silent goes on, as far as descriptors last."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from train_site import Site, node_process, processes_of, wait_for, wait_for_step, worker_of

from hpctrain.records.history.run_log import read_events, read_metrics

pytestmark = pytest.mark.slow

IDLE = 1000
"""Connections to each port."""
NEEDED = 10_000


@contextlib.contextmanager
def soft_limit(files: int) -> Iterator[None]:
    """This process, and what it starts, may have that many open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def ports_of(worker: psutil.Process) -> list[tuple[str, int]]:
    """Where a worker listens: its part of gloo, and the store where it holds rank 0."""
    connections = worker.net_connections(kind="tcp")
    return [(link.laddr.ip, link.laddr.port) for link in connections if link.status == psutil.CONN_LISTEN]


def test_resets_and_a_thousand_idle_connections_at_each_port_do_not_end_a_run(site: Site) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < NEEDED:
        pytest.skip(f"the hard limit of open files here is {hard}; this needs {NEEDED}")
    known = set((site.path / "runs").glob("*"))
    with soft_limit(1024):
        process = site.start(
            "train", "run.yaml", "--local", "2", "--topology", "four.json", "--set", "name=crowded",
            "--set", "steps=1000000", "--set", "cluster.nodes=2", "--set", "checkpoint.every=100000",
        )  # fmt: skip
    try:
        folder = site.run_folder(known)
        wait_for_step(folder, 2)
        workers = [worker_of(folder, node) for node in ("local0", "local1")]
        ports = [port for worker in workers for port in ports_of(worker)]
        assert len(ports) >= 3  # the store and both workers' gloo
        agents = [node_process(folder, node) for node in ("local0", "local1")]
        for port in [port for agent in agents for port in ports_of(agent)] + ports:
            for words in (b"", b"", b"\x00" * 100, b'{"type": "hello"'):
                reset_after(port, words)
        with soft_limit(NEEDED), contextlib.ExitStack() as stack:
            for port in ports:
                for _ in range(IDLE):
                    stack.enter_context(socket.create_connection(port, timeout=60))
            wait_for(lambda: all(worker.num_fds() > IDLE for worker in workers), 60, "the connections to be accepted")
            wait_for_step(folder, last_step(folder) + 10)
            assert all(worker.is_running() for worker in workers)
        wait_for_step(folder, last_step(folder) + 10)
        kinds = [event.kind for event in read_events(folder / "events.jsonl")]
        assert kinds.count("generation_started") == 1
        assert "worker_died" not in kinds
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=800)[0]
    wait_for(lambda: not processes_of(folder), 60, f"the end of the run: {said}")


def reset_after(port: tuple[str, int], words: bytes) -> None:
    """Connect, say something, and close with RST in place of FIN."""
    with socket.create_connection(port, timeout=60) as sock:
        sock.sendall(words)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def last_step(folder: Path) -> int:
    return max(row.step for row in read_metrics(folder / "metrics.jsonl"))
