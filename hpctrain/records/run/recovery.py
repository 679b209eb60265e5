"""The key `recovery` of run.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpctrain.records.format.document import DEVICES_MAX, STEPS_MAX, Part


class Recovery(Part):
    """How a run continues when workers or nodes are lost, and when it ends."""

    min_nodes: int = Field(default=1, ge=1, le=DEVICES_MAX)
    """Fewest nodes with which the run continues. With fewer nodes the attempt stops; on Slurm, another one is
    queued."""
    spares: int = Field(default=0, ge=0, le=DEVICES_MAX)
    """Nodes that stay idle until they replace a lost node."""
    retries: int = Field(default=3, ge=0, le=STEPS_MAX)
    """Failures in a row, without a new checkpoint in between, after which the next failure ends the run. They are
    counted within a job and over the jobs of the run. Lost nodes, preemption and the time limit do not count."""
    requeue: Literal["new_job", "same_job"] = "new_job"
    """How a run continues after an attempt. new_job: as a new job, without the bad nodes. same_job: the same job goes
    back into the queue, and may get any nodes."""
    successors: int = Field(default=0, ge=0, le=20)
    """With requeue new_job: number of jobs that are kept queued behind the running job, for partitions with short time
    limits. The next of them continues the run, however the running job ends."""
    exclude_hours: float = Field(default=24.0, ge=0)
    """Hours for which new jobs exclude a bad node; 0: they exclude none."""
    exclude_max_fraction: float = Field(default=0.25, ge=0, le=1)
    """Largest share of the nodes that the job's request allows (partition, constraint, exclude) that new jobs exclude
    as bad."""
    heartbeat_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds of silence after which a node counts as lost; a node whose connection closes counts as lost at once."""
    progress_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without a step after which a worker counts as hanging and its generation is ended."""
    memory: Literal["auto", "snapshots", "off"] = "auto"
    """Whether a generation can start from state in memory; with compression mode local_steps none can. auto: the state
    of CPU workers outlives them, and that of GPU workers with snapshot_every in its snapshots. snapshots: that of CPU
    workers, too, outlives them in its snapshots only. off: every generation starts from a checkpoint, or from the first
    weights."""
    snapshot_every: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=STEPS_MAX)] = "off"
    """Steps between two snapshots of the state, which go to another node, too, if no other node has that part of the
    state. auto: so many that snapshots take at most 3 % of the time. off: no snapshots."""

    @model_validator(mode="after")
    def _fits_together(self) -> Recovery:
        if self.successors and self.requeue == "same_job":
            raise ValueError(f"successors is {self.successors}, and requeue is same_job: use requeue: new_job, or none")
        if self.snapshot_every != "off" and self.memory == "off":
            raise ValueError(f"snapshot_every is {self.snapshot_every}, and memory is off: use memory: auto")
        if self.snapshot_every == "off" and self.memory == "snapshots":
            raise ValueError("snapshot_every is off, and memory is snapshots: set snapshot_every, or use memory: auto")
        return self
