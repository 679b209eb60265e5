"""The jobs that `hpctrain bench recovery` disturbs on a lab: a run of hpctrain, torchrun's elastic restart, and a plain
job that Slurm requeues."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpctrain.base.atomic import write_text
from hpctrain.base.clock import utc_text
from hpctrain.base.errors import CommandError
from hpctrain.base.module_argv import program
from hpctrain.base.process import WORKER_NAME, CommandResult, Process, end_process
from hpctrain.bench.planner.search import uniform_topology
from hpctrain.bench.recovery.plain_training import STEPS_FILE, PlainSettings
from hpctrain.lab.daemons import namespace_pids
from hpctrain.lab.layout import NODE_INTERFACE, LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.launch.small_run import BYTES_VOCABULARY, make_corpus, make_run
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.run_log import read_metrics
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.run.cluster import Cluster
from hpctrain.records.run.optimizer import Optimizer
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.run import Checkpoint
from hpctrain.records.topology.topology import Device, Node

PLAIN = "hpctrain.bench.recovery.plain_training"
TORCHRUN = "torch.distributed.run"
BYTES_PER_PARAMETER = 12
"""Bytes of a parameter and its two moments in fp32."""
COMMAND_S = 60.0
PORT = 29400
TIME_LIMIT_MIN = 120
ENDLESS = 10**6


@dataclass(frozen=True)
class TrainingSettings:
    """What all systems train, and how: the model, the batch, how often they save, and how long a peer may be silent."""

    spec: DecoderSpec
    rows: int = 12
    """Sequences of the global batch, which every number of nodes up to 4 divides."""
    seq_len: int = 16
    lr: float = 1e-4
    clip_norm: float = 1.0
    save_every: int = 5
    """Steps between two checkpoints."""
    heartbeat_timeout_s: float = 2.0
    """`recovery.heartbeat_timeout_s` of hpctrain's run."""
    collective_timeout_s: float = 10.0
    """Seconds after which a collective of the plain loop fails if a peer is silent."""
    torchrun_conf: str = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
    """`--rdzv-conf` of torchrun; its defaults are 30, 5 and 3. With even shorter times, agents on a busy machine may
    not find each other."""


def spec_of(state_bytes: int) -> DecoderSpec:
    """Return the spec of a model whose parameters and moments take at least `state_bytes` bytes."""
    dim = 512 if state_bytes > 50e6 else 64
    for layers in range(1, 10_000):
        spec = DecoderSpec(layers=layers, dim=dim, heads=dim // 64, vocab=BYTES_VOCABULARY)
        if BYTES_PER_PARAMETER * spec.parameters() >= state_bytes:
            return spec
    raise AssertionError(f"no model with a state of {state_bytes} bytes")


@dataclass(frozen=True)
class TrainedStep:
    """One step that a job has done. `life` numbers the starts of its workers: it is larger after each fault."""

    step: int
    life: int
    time_s: float
    """End of the step, seconds since 1970."""
    step_time_s: float
    loss: float
    """Mean loss of the global batch in nats."""


@dataclass(frozen=True)
class LabSite:
    """The lab's nodes on which the jobs run, and the folder for their files."""

    machine: Machine
    layout: LabLayout
    nodes: tuple[str, ...]
    folder: Path
    training: TrainingSettings
    bench: str = "bench recovery"
    """Name of the bench, for error messages."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the jobs' commands. Files that a run of hpctrain writes outside of its run folder go into
        `folder`."""
        # Else ranks of torchrun that restart meet addresses of an earlier start in its store.
        torchrun = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        own = {"SLURM_CONF": str(self.layout.slurm_conf), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": NODE_INTERFACE}
        runs = {"HPCTRAIN_RUNS": str(self.folder / "runs"), "XDG_STATE_HOME": str(self.folder / "state")}
        return {**os.environ, **own, **runs, **torchrun}

    def run(self, argv: Sequence[str], check: bool = True) -> CommandResult:
        """Run a command with the jobs' environment, and return its exit code and output.

        Raises:
            CommandError: with `check`, the command failed.
        """
        done = self.machine.runner.run(argv, COMMAND_S, self.environment)
        if check and done.code != 0:
            words = " ".join((done.stderr or done.stdout).split())[-400:]
            raise CommandError(f"{self.bench}: {shlex.join(argv[:6])} … ended with {done.code}: {words}")
        return done

    def slurm(self, name: str, *words: str, check: bool = True) -> str:
        """Run a command of the lab's Slurm, such as squeue, and return its output.

        Raises:
            CommandError: with `check`, the command failed.
        """
        return self.run([self.layout.slurm.program(name), *words], check).stdout.strip()

    def pids(self, node: str) -> set[int]:
        """Return the ids of all processes of a node."""
        return set(namespace_pids(self.machine, self.layout.namespace(node)))


class TrainingJob(ABC):
    """A job that trains on the lab's nodes, and may go on after a fault. `number` is part of its folder's name."""

    def __init__(self, site: LabSite, number: int) -> None:
        self.site = site
        self.folder = site.folder / f"job{number}"
        self.name = f"bench-{secrets.token_hex(4)}"
        """Name of its Slurm jobs; no other job has it."""

    @abstractmethod
    def start(self) -> None:
        """Start the job; return before its first step.

        Raises:
            CommandError: the job cannot be submitted, or does not start.
        """

    @abstractmethod
    def steps(self) -> list[TrainedStep]:
        """Return the steps that the job has done so far, in the order in which they ended."""

    @abstractmethod
    def worker(self, node: str) -> int | None:
        """Return the process id of the training process of a node; None if there is none."""

    @abstractmethod
    def why_over(self) -> str | None:
        """Return why the job makes no further step; None while it may."""

    def end(self) -> None:
        """End the job and everything that belongs to it, also if its start was interrupted."""
        self.site.slurm("scancel", f"--name={self.name}", check=False)


class HpctrainJob(TrainingJob):
    """A run that `hpctrain submit` submitted, with data parallelism over all nodes and ZeRO 0."""

    def __init__(self, site: LabSite, number: int, recovery: Mapping[str, Any]) -> None:
        """Begin without a run.

        Args:
            recovery: keys of the run's `recovery` that differ from the bench's.
        """
        super().__init__(site, number)
        self._recovery = recovery
        self._run: Path | None = None

    def start(self) -> None:
        training = self.site.training
        self._make_run(
            deterministic=True, checkpoint=Checkpoint(every=training.save_every),
            recovery=Recovery.model_validate(
                {"retries": ENDLESS, "heartbeat_timeout_s": training.heartbeat_timeout_s, **self._recovery}
            ),
        )  # fmt: skip
        self._write_topology()
        self._submit(self.folder / "topology.json")

    def _make_run(self, **keys: Any) -> None:
        """Write the run file of a run on all nodes of the site.

        Args:
            keys: keys of the run file besides model, data, batch, optimizer, cluster and steps.
        """
        site, training = self.site, self.site.training
        self.folder.mkdir()
        if not (corpus := site.folder / "corpus").exists():
            make_corpus(corpus)
        make_run(
            self.folder / "given", corpus, training.spec, training.rows, training.seq_len, steps=ENDLESS,
            name=self.name, optimizer=Optimizer(lr=training.lr, clip_norm=training.clip_norm),
            cluster=Cluster(
                kind="slurm", device="cpu", nodes=str(len(site.nodes)), nodelist=",".join(site.nodes),
                time=str(TIME_LIMIT_MIN),
            ),
            **keys,
        )  # fmt: skip

    def _submit(self, topology: Path) -> None:
        words = ["submit", str(self.folder / "given" / "run.yaml"), "--topology", str(topology)]
        answer = json.loads(self.site.run([*program("hpctrain"), *words, "--json"]).stdout)
        self._run = Path(answer["folder"])

    def _write_topology(self) -> None:
        """Write figures of nodes and links with which the planner gives each node a replica. Measured ones would give
        another plan under other load."""
        device = Device(
            id="cpu0", type="cpu", flops={"fp32": 1e9}, memory_bytes=8e9, memory_bytes_per_s=5e9, launch_s=1e-6
        )
        layout = self.site.layout
        nodes = [
            Node(id=name, addr=layout.address(name), iface=NODE_INTERFACE, host=name, devices=[device])
            for name in self.site.nodes
        ]
        topology = uniform_topology(nodes, "cpu", alpha_s=1e-3, beta_s_per_byte=1e-10)
        created = utc_text(self.site.machine.clock.wall())
        stamped = topology.provenance.model_copy(update={"created": created})
        topology.model_copy(update={"provenance": stamped}).write(self.folder / "topology.json")

    def steps(self) -> list[TrainedStep]:
        rows = read_metrics(self._run / "metrics.jsonl") if self._run is not None else []
        return [TrainedStep(row.step, row.generation, row.time_s, row.step_time_s, row.loss) for row in rows]

    def worker(self, node: str) -> int | None:
        for pid in self.site.pids(node):
            try:
                if psutil.Process(pid).name().startswith(WORKER_NAME.format("")):
                    return pid
            except psutil.Error:
                continue
        return None

    def why_over(self) -> str | None:
        return None

    def end(self) -> None:
        # Without this, the run would go on in another job. An interrupted start has not told the folder.
        for run in (self.site.folder / "runs").glob(f"{self.name}-*"):
            self.site.run([*program("hpctrain"), "cancel", "--now", str(run)], check=False)
        super().end()


class PlainJob(TrainingJob):
    """A job of the plain loop, `plain_training`."""

    def __init__(self, site: LabSite, number: int) -> None:
        super().__init__(site, number)
        self._job_id = ""

    def steps(self) -> list[TrainedStep]:
        return [TrainedStep(**line) for line in read_jsonl(self.folder / STEPS_FILE, owned=False)]

    def worker(self, node: str) -> int | None:
        inside = self.site.pids(node)
        for pid, argv in self.site.machine.processes.commands():
            if pid in inside and PLAIN in argv and str(self.folder) in argv and TORCHRUN not in argv:
                return pid
        return None

    def _submit(self, text: str, *options: str) -> None:
        training, script = self.site.training, self.folder / "job.sh"
        self.folder.mkdir()
        PlainSettings(
            training.spec, training.rows, training.seq_len, training.lr, training.clip_norm, training.save_every,
            training.collective_timeout_s,
        ).write(self.folder)  # fmt: skip
        write_text(script, f"#!/bin/bash\n{text}\n")
        others = ",".join(name for name in self.site.layout.names if name not in self.site.nodes)
        where = (f"--exclude={others}",) if others else ()
        output = ("--open-mode=append", f"--output={self.folder}/job.log")
        fixed = ("--parsable", f"--job-name={self.name}", f"--time={TIME_LIMIT_MIN}", *where, *output)
        self._job_id = self.site.slurm("sbatch", *fixed, *options, str(script))

    def _state(self) -> str:
        """Return Slurm's state of the job, such as RUNNING; empty if Slurm does not know it any more."""
        return self.site.slurm("squeue", "--noheader", f"--jobs={self._job_id}", "--format=%T", check=False)


class TorchrunJob(PlainJob):
    """torchrun's elastic agents, one a node, in a job that outlives its nodes; the first node has the store through
    which they meet."""

    def __init__(self, site: LabSite, number: int) -> None:
        super().__init__(site, number)
        self._agents: list[Process] = []

    def start(self) -> None:
        site, count = self.site, len(self.site.nodes)
        self._submit("sleep infinity", f"--nodes={count}", "--no-kill")
        if not site.machine.wait(lambda: self._state() == "RUNNING", COMMAND_S):
            raise CommandError(f"bench recovery: job {self._job_id} of torchrun does not start; see `squeue`")
        store = f"{site.layout.address(site.nodes[0])}:{PORT}"
        for node in site.nodes:
            is_host = str(node == site.nodes[0]).lower()
            agent = [
                *program(TORCHRUN), f"--nnodes={max(1, count - 1)}:{count}", "--nproc-per-node=1",
                "--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint={store}", f"--rdzv-id={self._job_id}",
                f"--rdzv-conf={site.training.torchrun_conf},is_host={is_host}",
                f"--local-addr={site.layout.address(node)}", "--no-python", *program(PLAIN), str(self.folder),
            ]  # fmt: skip
            step = (
                "srun", f"--jobid={self._job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}",
                "--no-kill", "--kill-on-bad-exit=0",
            )  # fmt: skip
            argv = [site.layout.slurm.program(step[0]), *step[1:], *agent]
            log = self.folder / f"{node}.log"
            self._agents.append(site.machine.runner.start(argv, env=site.environment, log=log))

    def why_over(self) -> str | None:
        codes = [agent.poll() for agent in self._agents]
        return f"all agents have ended ({', '.join(map(str, codes))})" if None not in codes else None

    def end(self) -> None:
        super().end()
        for agent in self._agents:
            end_process(agent)


class RequeuedJob(PlainJob):
    """A plain job: it ends when a rank or a node is lost, Slurm puts it back into the queue, and it goes on from its
    newest saved state, on the nodes that it then gets."""

    def start(self) -> None:
        site = self.site
        srun, scontrol = (site.layout.slurm.program(name) for name in ("srun", "scontrol"))
        task = shlex.join([*program(PLAIN), str(self.folder)])
        text = (
            f"export MASTER_ADDR=$({scontrol} show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT={PORT}\n"
            f"{srun} --ntasks-per-node=1 --kill-on-bad-exit=1 {task} || {scontrol} requeue $SLURM_JOB_ID"
        )
        count = len(site.nodes)
        self._submit(text, f"--nodes={max(1, count - 1)}-{count}", "--requeue", "--ntasks-per-node=1")

    def why_over(self) -> str | None:
        return None if self._state() else f"Slurm has no job {self._job_id}"
