"""The training loop in processes that no agent started: for benches and the selfcheck."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from hpctrain.agent.worker_messages import Report, StartOrder, StoreConnection
from hpctrain.records.plan.plan import Plan
from hpctrain.worker.agent_channel import Ending
from hpctrain.worker.build import Trainer, build
from hpctrain.worker.loop import Loop


def open_loop(rank: int, world: int, folder: Path, plan: Plan, address: str = "127.0.0.1") -> tuple[Trainer, Loop]:
    """Return the trainer and the training loop of one rank of `plan`. No agent is needed: the function makes the start
    order itself. All ranks run on one machine. Collective over all ranks. The errors are those of `build`.

    Args:
        world: number of ranks.
        folder: a folder with the run's run.yaml. The plan is written there, and the ranks find each other there.
        address: address of rank 0, at which it serves the store of the process group.
    """
    descriptor, meeting = None, dist.FileStore(str(folder / "meeting"), world)
    if rank == 0:
        plan.write(folder / "plan.json")
        server = socket.create_server((address, 0))
        meeting.set("port", str(server.getsockname()[1]))
        descriptor = server.detach()
    port = int(meeting.get("port"))
    store = StoreConnection(addr=address, port=port, secret="bench", fd=descriptor)
    trainer = build(folder, StartOrder(plan="plan.json", rank=rank, generation=0, store=store))
    return trainer, loop_alone(trainer)


def loop_alone(trainer: Trainer) -> Loop:
    """Return a training loop of the trainer that has no agent: nobody can stop it, and its reports are dropped."""
    return Loop(trainer, NoAgentChannel())  # type: ignore[arg-type]


class NoAgentChannel:
    """Replaces the agent channel in a training loop without an agent: it never orders an end and drops all
    reports."""

    def stop_wanted(self) -> bool:
        return False

    def ending(self) -> Ending:
        return Ending.NONE

    def send(self, report: Report) -> None:
        pass
