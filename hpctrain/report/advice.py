"""What would make the next run cheaper: notes from a run's files that end in the key or option to set. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.records.format.node_name import compress_node_set
from hpctrain.records.history.rank_log import RankRow
from hpctrain.records.history.run_log import Event
from hpctrain.records.run.run import Run
from hpctrain.report.cost import AttemptSpan
from hpctrain.report.device_hours import DeviceHours
from hpctrain.report.rank_times import SLOW, slowness
from hpctrain.report.status import RunStatus
from hpctrain.slurm.values import format_time_limit, parse_time_limit

USED_TIME = 0.5
"""A time limit of which less than this share was used is called long."""
MARGIN = 1.25
"""The proposed shorter time limit is the longest attempt's time times this factor, rounded up."""
MUCH = 0.1
"""Largest share without a note: warm-up of the device-hours, waits between jobs of the attempts' hours, lost steps of
the steps."""
EXPOSED = 0.25
"""Largest share of a step that ranks wait for sums over replicas without a note."""


@dataclass(frozen=True)
class NextTime:
    """A note about the next run."""

    text: str
    """What was seen, in one sentence."""
    setting: str
    """Key of the run file with its value, or an option of `submit`: what to set."""


@dataclass(frozen=True)
class RunFacts:
    """What the notes about the next run are made from."""

    run: Run
    status: RunStatus
    events: Sequence[Event]
    spans: Sequence[AttemptSpan]
    """Times of the attempts."""
    device_hours: DeviceHours | None
    ranks: Sequence[RankRow]
    """The newest row of each rank in metrics-ranks.jsonl."""


def next_time(facts: RunFacts) -> list[NextTime]:
    """Return the notes of a run: about its time limit, waits between its jobs, nodes to avoid, steps done again, and
    waits for sums, in this order; [] where nothing stands out. A run that is not a Slurm job has only the last two."""
    notes = [*_nodes(facts), *_again(facts), *_sums(facts)]
    return [*_time_limit(facts), *_waits(facts), *notes] if facts.run.cluster.kind == "slurm" else notes


def _time_limit(facts: RunFacts) -> Iterator[NextTime]:
    limit_s = parse_time_limit(facts.run.cluster.time) if facts.run.cluster.time else None
    if limit_s is None or not facts.spans:
        return
    used_s = max(span.hours for span in facts.spans) * 3600.0
    stopped = sum(event.kind == "time_limit" for event in facts.events)
    if facts.status.state == "done" and not stopped and used_s < USED_TIME * limit_s:
        step_s = 600 if MARGIN * used_s < 7200 else 1800
        shorter = format_time_limit(int(-(-MARGIN * used_s // step_s) * step_s))
        text = f"Only {used_s / limit_s:.0%} of the time limit was used; Slurm starts shorter jobs sooner."
        yield NextTime(text.replace("%", " %"), f"cluster.time: {shorter}")
    elif stopped and facts.device_hours and facts.device_hours.share("warm_up") > MUCH:
        share = f"{facts.device_hours.share('warm_up'):.0%}".replace("%", " %")
        text = f"The time limit ended {stopped} attempts, and {share} of the device-hours were warm-up; "
        yield NextTime(f"{text}longer jobs start less often, if the partition allows them.",
                       f"cluster.time: {format_time_limit(2 * limit_s)}")  # fmt: skip


def _waits(facts: RunFacts) -> Iterator[NextTime]:
    recovery = facts.run.recovery
    waits = [
        max(0.0, after.start_s - before.end_s) for before, after in zip(facts.spans, facts.spans[1:], strict=False)
    ]
    total_h = sum(span.hours for span in facts.spans)
    if recovery.requeue == "new_job" and not recovery.successors and sum(waits) > MUCH * 3600.0 * total_h:
        text = f"Between its jobs the run waited {sum(waits) / 3600.0:.3g} h; a job queued early waits meanwhile."
        yield NextTime(text, "recovery.successors: 1")


def _nodes(facts: RunFacts) -> Iterator[NextTime]:
    """Yield up to two notes about nodes to avoid: one about nodes with several faults or with unhealthy GPUs, one about
    nodes with ranks that compute longer than their peers."""
    if facts.run.cluster.kind != "slurm":
        return
    faults = Counter(
        str(event.data.get("node", event.node)) for event in facts.events
        if event.kind in ("worker_died", "node_lost", "gpu_unhealthy")
    )  # fmt: skip
    sick = {str(event.data.get("node", event.node)) for event in facts.events if event.kind == "gpu_unhealthy"}
    sick |= {node for node, count in faults.items() if count > 1}
    if sick:
        names = compress_node_set(sorted(sick))
        yield NextTime(f"{names} had faults more than once, or a GPU that is not well.", f"--exclude {names}")
    by_rank = slowness(facts.ranks)
    ratios = [(by_rank[row.rank], row.device.split(":")[0]) for row in facts.ranks if row.rank in by_rank]
    slow = sorted({node for ratio, node in ratios if ratio > SLOW} - sick)
    if slow:
        names, worst = compress_node_set(slow), max(ratio for ratio, _ in ratios)
        text = f"Ranks on {names} compute up to {worst:.2f} times as long as their peers, and all others wait for them."
        yield NextTime(text, f"--exclude {names}")


def _again(facts: RunFacts) -> Iterator[NextTime]:
    status, run = facts.status, facts.run
    if status.lost_steps <= MUCH * max(1, status.step):
        return
    text = f"{status.lost_steps} steps were done again after faults; "
    if run.recovery.memory == "off":
        yield NextTime(f"{text}state in memory loses none where workers die.", "recovery.memory: auto")
    elif run.checkpoint.every > 1:
        every = max(1, run.checkpoint.every // 2)
        yield NextTime(f"{text}with more checkpoints they would be fewer.", f"checkpoint.every: {every}")


def _sums(facts: RunFacts) -> Iterator[NextTime]:
    if facts.run.compression.mode != "none" or not facts.ranks:
        return
    waits = sum(row.wait_dp_s for row in facts.ranks)
    total = sum(row.compute_s + row.wait_pp_s + row.wait_dp_s + row.wait_world_s for row in facts.ranks)
    if total and waits > EXPOSED * total:
        text = (
            f"Ranks wait {waits / total:.0%} of a step for sums over replicas; compressed gradients are shorter, and "
        )
        yield NextTime(f"{text}change the training (docs: compression).".replace("%", " %"), "compression.mode: auto")
