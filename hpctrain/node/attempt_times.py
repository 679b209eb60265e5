"""What an attempt has measured so far, read from the run folder while it goes on (`AttemptTimes`)."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hpctrain.checkpoint import published
from hpctrain.planner.adapt.decision import PlanChange
from hpctrain.planner.adapt.measured import MeasuredSpeeds, SpeedTracker
from hpctrain.planner.replan.calibration import WARMUP_STEPS
from hpctrain.records.format.file_tail import FileTail, rows_of
from hpctrain.records.history.generation import GENERATIONS, Generation, record_file
from hpctrain.records.history.layer_figures import LayerFigures, layers_of_ranks
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import Event, MetricRow
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology

TAIL_BYTES = 1 << 22
"""Most bytes of a log of figures that the first call reads. Earlier rows are not used."""
NEWEST_ROWS = 2000
"""Most rows of metrics.jsonl that are kept beside the first ones of the generation."""


class AttemptTimes:
    """The rows, events and plans of one attempt. Each call of `read` reads what was written since the last one."""

    def __init__(self, folder: Path, run: Run, attempt: int) -> None:
        """Prepare to read; no file is read.

        Args:
            folder: the run folder.
        """
        self._folder, self._run, self._attempt = folder, run, attempt
        self._event_tail = FileTail(folder / "events.jsonl")
        self._metric_tail = FileTail(folder / "metrics.jsonl", TAIL_BYTES)
        self._rank_tail = FileTail(folder / RANK_LOG, TAIL_BYTES)
        self._tracker: SpeedTracker | None = None
        self._everybody: Topology | None = None
        self._first_rows: list[MetricRow] = []
        self._rows: deque[MetricRow] = deque(maxlen=NEWEST_ROWS)
        self._rank_rows: list[RankRow] = []
        self._disturbed_until = -1
        """Steps up to this one do not count, except those that were read before."""
        self.events: list[Event] = []
        """The attempt's events."""
        self.records: list[Generation] = []
        """The records of the attempt's generations, in order."""
        self.plans: dict[int, Plan] = {}
        """Number of each of these generations -> its plan."""
        self.layers: tuple[LayerFigures, ...] = ()
        """The newest figures of layers, over all ranks."""
        self.topology: Topology | None = None
        """The nodes of the present generation, with the speeds that the probe measured."""

    def read(self, record: Generation) -> None:
        """Read what is new.

        Args:
            record: the generation that trains.

        Raises:
            FileError: the topology, a plan or a record is missing or has errors.
            UntrustedError: a file of the run is untrusted.
            InputError: the cost model cannot predict a plan of the attempt.
        """
        new = rows_of(Event, self._event_tail.values())
        self.events += [event for event in new if event.attempt == self._attempt]
        rows = [row for row in rows_of(MetricRow, self._metric_tail.values()) if row.step > self._disturbed_until]
        ranks = rows_of(RankRow, self._rank_tail.values())
        if self._tracker is None or self._everybody is None:
            self._everybody = Topology.read(self._folder / "topology.json", owned=True)
            self._tracker = SpeedTracker(self._run, self._run.spec(), self._everybody)
        self._rank_rows += [row for row in ranks if row.step - row.steps >= self._disturbed_until]
        if measured := [row for row in self._rank_rows if row.layers]:
            newest = [row.layers or [] for row in measured if row.step == measured[-1].step]
            self.layers = tuple(layers_of_ranks(newest))
        for number in range(self._next_number(record), record.number + 1):
            self._begin(self._read_record(record, number))
            self.topology = self._everybody.only([member.node for member in record.members])
        self._tracker.add(row for row in self._rank_rows if row.generation == record.number)
        self._rank_rows = []
        for row in rows:
            if row.generation != record.number:
                continue
            if len(self._first_rows) < WARMUP_STEPS:
                self._first_rows.append(row)
            else:
                self._rows.append(row)

    def leave_out_new_steps(self) -> None:
        """Let the steps since the last call of `read`, and the one under way, not count: the search for a plan has
        slowed this node down meanwhile."""
        if new := list(rows_of(MetricRow, self._metric_tail.values())):
            self._disturbed_until = new[-1].step + 1

    def _next_number(self, record: Generation) -> int:
        if self.records:
            return self.records[-1].number + 1
        numbers = [event.generation for event in self.events if event.kind == "generation_started"]
        return min([*numbers, record.number])

    def _read_record(self, newest: Generation, number: int) -> Generation:
        # The newest one may not be published yet.
        path = record_file(self._folder / GENERATIONS, number)
        return newest if number == newest.number else Generation.read(path, owned=True)

    def _begin(self, record: Generation) -> None:
        assert self._tracker is not None, "made before"
        if self.records:
            # What came after the last call, of the generation before.
            self._tracker.add(row for row in self._rank_rows if row.generation == self.records[-1].number)
        plan = Plan.read(self._folder / record.plan, owned=True)
        self._tracker.begin(plan, _addresses(record))
        self.records.append(record)
        self.plans[record.number] = plan
        self._first_rows, self._rows = [], deque(maxlen=NEWEST_ROWS)

    @property
    def rows(self) -> list[MetricRow]:
        """The present generation's rows of metrics.jsonl, in order: the first `WARMUP_STEPS` and the newest
        `NEWEST_ROWS`; those between are dropped."""
        return [*self._first_rows, *self._rows]

    @property
    def began(self) -> int:
        """The last step before the attempt began."""
        return _start_of(self.records[0])

    def speeds(self) -> MeasuredSpeeds:
        """Return the measured speeds of the devices."""
        assert self._tracker is not None, "read was called"
        return self._tracker.measured()

    def start_s(self) -> float | None:
        """Return the seconds from the start of the present generation's workers to the end of its first step; None
        if not known."""
        starts = [
            event.time_s
            for event in self.events
            if event.kind == "generation_started" and event.generation == self.records[-1].number
        ]
        return self._first_rows[0].time_s - starts[-1] if starts and self._first_rows else None

    def moves(self) -> list[tuple[int, PlanChange]]:
        """Return the attempt's changes of plan without a fault, in order: number of the generation that each began, and
        the change."""
        moves = []
        records = {record.number: record for record in self.records}
        for event in self.events:
            number, data = event.generation, event.data
            if event.kind != "adapted" or number not in records or number - 1 not in self.plans:
                continue
            move = PlanChange(
                _start_of(records[number]), self.plans[number - 1], self.plans[number], data["measured_step_time_s"],
                data["predicted_step_time_s"], data["taken_back"], data.get("corrects_probe", False),
            )  # fmt: skip
            moves.append((number, move))
        return moves


def _addresses(record: Generation) -> dict[str, str]:
    """Return address -> node of a generation's members. An address that several virtual nodes share is left
    out."""
    nodes: dict[str, list[str]] = {}
    for member in record.members:
        nodes.setdefault(member.addr, []).append(member.node)
    return {address: names[0] for address, names in nodes.items() if len(names) == 1}


def _start_of(record: Generation) -> int:
    """Return the last step before a generation began."""
    if record.memory is not None:
        return record.memory.step
    return 0 if record.restore is None else published.step_of(Path(record.restore))
