"""The store through which the ranks of a process group find each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hpctrain.agent.worker_messages import StoreConnection


def open_store(connection: StoreConnection, world: int, timeout: timedelta) -> dist.Store:
    """Return a client of a process group's store. If `connection.fd` is given, this process also serves the store on
    that inherited socket.

    torch's store accepts every process that reaches its port, so a secret is the prefix of every key. The secret keeps
    out late processes of another group that connect by mistake, but no attacker: see docs/security.md.

    Args:
        world: number of ranks in the process group.
        timeout: time limit of each operation on the store.

    Raises:
        RuntimeError: the store cannot be reached within the time limit (`DistNetworkError`).
    """
    store = dist.TCPStore(
        connection.addr, connection.port, world, is_master=connection.fd is not None, timeout=timeout,
        wait_for_workers=False, master_listen_fd=connection.fd,
    )  # fmt: skip
    return dist.PrefixStore(connection.secret, store)
