"""`hpctrain bench checkpoint --kills N`: N times SIGKILL at a random moment of a real training loop that saves after
every step.

Two pipeline ranks train. One rank, or both, is killed at a random moment. A surviving rank is killed soon after, as an
agent does it. Then the run folder is checked as the next generation does it: the published checkpoint verifies, is not
older than the one before the kill, and loads. Every rank records a hash of its state before each save. The state that
the ranks load at their next start must have the hash of its step, and training on from it must give the recorded hashes
again.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.agent.worker_messages import StartOrder, StoreConnection
from hpctrain.base.errors import HpctrainError
from hpctrain.bench.ranks import run_ranks
from hpctrain.bench.record import make_record
from hpctrain.checkpoint import published
from hpctrain.checkpoint.state import collect
from hpctrain.launch.small_run import BYTES_VOCABULARY, make_plan, make_run, temporary_corpus
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.run.run import Checkpoint
from hpctrain.worker.build import Trainer, build
from hpctrain.worker.standalone import loop_alone

WORLD = 2
SPEC = DecoderSpec(layers=4, dim=128, heads=4, vocab=BYTES_VOCABULARY)
PATIENCE_S = 60.0
OLDER_ONE = 0.25
"""Share of the starts that load the older of the two remaining checkpoints, so that a step is saved twice."""


@dataclass
class KillResult:
    """Result of the bench, over all kills: how many interrupted a write (`while_writing`), after how many no checkpoint
    verified (`lost`) or at most an older one than before (`older`), and which published checkpoints did not verify
    (`corrupt`). `last_step` is the step of the newest checkpoint at the end."""

    kills: int = 0
    while_writing: int = 0
    """Kills that left an unfinished checkpoint behind."""
    lost: int = 0
    """Kills after which no checkpoint verified, although one had verified before. They count in `older`, too."""
    older: int = 0
    """Kills after which the newest checkpoint that verified was older than the newest one before the kill."""
    corrupt: list[str] = field(default_factory=list)
    """Published checkpoints that did not verify, each with the reason."""
    last_step: int = 0
    seconds: float = 0.0
    """Seconds that all kills took together, with the checks of the checkpoints after them."""


def measure_kills(count: int, progress: Callable[[str], None], seed: int = 0) -> dict[str, Any]:
    """Kill the ranks `count` times, and check the checkpoints after each kill; return the record of the bench.

    Args:
        progress: called with the number of kills before the first one.
        seed: seed of the moments of the kills and of the model.

    Raises:
        HpctrainError: a checkpoint that verified did not load, or the loaded state was not the saved one.
    """
    progress(f"{count} kills")
    with temporary_corpus() as folder:
        plan = make_plan(WORLD, 1, SPEC.layers, 2, 4)
        checkpoint = Checkpoint(every=1, keep=2)
        make_run(folder / "run", folder / "corpus", SPEC, plan.sequences, 32, checkpoint=checkpoint, seed=seed)
        plan.write(folder / "run" / "plan.json")
        result = run_ranks(_all_lives, 1, folder / "run", count, seed)
    settings = {"seed": seed, "spec": SPEC.model_dump(exclude_none=True)}
    return make_record("checkpoint", [], settings) | {"kills": asdict(result)}


def _all_lives(rank: int, world: int, folder: Path, count: int, seed: int) -> KillResult:
    """Start and kill the ranks `count` times, and return how many kills had which effect. This process has imported
    everything and computed nothing, so that the workers that it forks can train at once."""
    chance, result, start = random.Random(seed), KillResult(), time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    checkpoints, newest = folder / "checkpoints", 0
    for life in range(count):
        _one_life(folder, life, _restore(checkpoints, chance), chance)
        result.kills += 1
        result.while_writing += any(checkpoints.glob(".step-*.tmp"))
        published.discard_unfinished(checkpoints)
        best, skipped = published.newest(checkpoints)
        result.corrupt += [f"{item.path.name}: {item.reason}" for item in skipped]
        result.lost += best is None and newest > 0
        step = best.manifest.step if best is not None else 0
        result.older += step < newest
        newest = result.last_step = max(newest, step)
    result.seconds = time.perf_counter() - start
    return result


def _restore(checkpoints: Path, chance: random.Random) -> str | None:
    paths = published.listed(checkpoints)
    if not paths:
        return None
    chosen = paths[-2] if len(paths) > 1 and chance.random() < OLDER_ONE else paths[-1]
    return f"checkpoints/{chosen.name}"


def _one_life(folder: Path, life: int, restore: str | None, chance: random.Random) -> None:
    """Start the two ranks, wait for a few steps, then kill one rank or both at a random moment, and soon after the rank
    that survived, if any.

    Args:
        life: how often the ranks were started before.
        restore: path of the checkpoint to load, within the run folder; None to begin anew.
        chance: source of the random moment and of the choice of ranks.
    """
    server = socket.create_server(("127.0.0.1", 0))
    news, report = os.pipe()
    workers = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            os.close(news)
            _work(folder, life, rank, restore, server, report)
        workers.append(pid)
    server.close()
    os.close(report)
    try:
        _await_steps(news, chance.randint(1, 3), folder)
        time.sleep(chance.uniform(0.0, 0.15))
        for pid in chance.choice((workers, workers[:1], workers[1:])):
            os.kill(pid, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 0.03))
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(news)


def _await_steps(news: int, count: int, folder: Path) -> None:
    seen = 0
    while seen < count:
        ready, _, _ = select.select([news], [], [], PATIENCE_S)
        text = os.read(news, 100) if ready else b""
        seen += text.count(b".")
        if not text or b"!" in text:
            errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
            raise HpctrainError("a worker failed before it was killed:\n" + ("\n".join(errors) or "it said nothing"))


def _work(folder: Path, life: int, rank: int, restore: str | None, server: socket.socket, report: int) -> NoReturn:
    """Train and save in a forked worker until it is killed. Rank 0 writes '.' for each step, and any rank '!' for an
    error, to the pipe `report`.

    Args:
        folder: the run folder.
        life: number of this start of the ranks, which serves as the number of the generation.
        restore: path of the checkpoint to load, within the run folder; None to begin anew.
        server: listening socket of the ranks' store, which rank 0 serves.
    """
    try:
        # torch's messages about a killed peer are expected here.
        os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
        port, descriptor = server.getsockname()[1], server.detach()
        store = StoreConnection(addr="127.0.0.1", port=port, secret="bench", fd=descriptor if rank == 0 else None)
        trainer = build(folder, StartOrder(plan="plan.json", rank=rank, generation=life, store=store, restore=restore))
        notes = StateHashes(folder / f"hashes-{rank}", trainer)
        if trainer.step:
            notes.compare(trainer.step)
        notes.before_each_save()
        loop = loop_alone(trainer)
        while True:
            loop.one_step()
            if rank == 0:
                os.write(report, b".")
    except BaseException:  # no error may let the fork go on as a second parent
        # A rank whose peer was killed ends here too; the parent reads only what was written before the kill.
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        os.write(report, b"!")
        os._exit(1)


class StateHashes:
    """Hashes of the state that one rank has at each step for which `compare` was called, in a file that outlives the
    rank's process."""

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self._path = path
        self._trainer = trainer

    def before_each_save(self) -> None:
        """Make the trainer call `compare` before each save from now on."""
        save = self._trainer.saver.save

        def noted(tensors: dict[str, Any], manifest: Manifest) -> None:
            self.compare(manifest.step)
            save(tensors, manifest)

        self._trainer.saver.save = noted  # type: ignore[method-assign]

    def compare(self, step: int) -> None:
        """Compare the hash of the present state with the one that the hash file has for the step number `step`, if any,
        and append a line with the step and the hash of the present state to the file.

        Raises:
            HpctrainError: the file has another hash for this step.
        """
        known = dict(line.split() for line in self._path.read_text().splitlines()) if self._path.exists() else {}
        now = self._hash()
        if known.get(str(step), now) != now:
            raise HpctrainError(f"the state of step {step} is not the one that was saved")
        with self._path.open("a") as file:
            file.write(f"{step} {now}\n")

    def _hash(self) -> str:
        digest = hashlib.sha256()
        state = collect(self._trainer.pipeline.parameters(), self._trainer.optimizer)
        for name in sorted(state):
            digest.update(name.encode())
            digest.update(state[name].contiguous().numpy().data)
        return digest.hexdigest()
