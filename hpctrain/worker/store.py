"""The store through which the ranks of a process group find each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hpctrain.agent.worker_messages import StoreConnection


def open_store(connection: StoreConnection, world: int, timeout: timedelta) -> dist.Store:
    """Connect to the store, or serve it on the inherited socket.

    torch accepts everyone who reaches the port. The secret is a prefix of every key. It keeps out late processes of
    another group that connect by mistake, but no attacker: see docs/security.md.
    """
    store = dist.TCPStore(
        connection.addr, connection.port, world, is_master=connection.fd is not None, timeout=timeout,
        wait_for_workers=False, master_listen_fd=connection.fd,
    )  # fmt: skip
    return dist.PrefixStore(connection.secret, store)
