"""plan.json: which device computes which blocks of which sequences when. The job follows it exactly."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AliasChoices, Field, model_validator

from hpctrain.records.format.document import BATCH_MAX, DEVICES_MAX, LAYERS_MAX, Document, Part
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.compression import Codec, CodecSpec
from hpctrain.records.plan.gradient_codec import Messages
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.plan.schedule import Action, Schedule


class ParallelDims(NamedTuple):
    """The degrees pp (pipeline ranks of a replica), dp (replicas) and tp (devices that share each matrix)."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        """Return the degrees as text: 'pp 2 × dp 1 × tp 1'."""
        return f"pp {self.pp} × dp {self.dp} × tp {self.tp}"


ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "custom"]
Recompute = Literal["none", "selective", "full"]
ZeroLevel = Literal[0, 1, 2, 3]
LayerNumber = Annotated[int, Field(ge=0, le=LAYERS_MAX)]


class Stage(Part):
    """Consecutive blocks that one device (or tp devices) holds."""

    layers: tuple[LayerNumber, LayerNumber]
    """Blocks [from, to). The first stage also holds the embedding, the last the head; either may have no block."""
    recompute: Recompute = "none"
    """Which activations the backward pass computes again. none. selective: all but the results of matrix products and
    attention. full: everything within a block."""
    messages: Messages = "none"
    """How the stage's output is sent to the next stage, and the gradient back, where the two stages are on different
    nodes. none: in fp32. bf16. int8: integers of 8 bits with a scale for each 256 of them."""


class Replica(Part):
    """One copy of the model, over all stages, and its share of each batch."""

    sequences: int = Field(ge=1, le=BATCH_MAX, validation_alias=AliasChoices("sequences", "rows"))
    """Sequences of each global batch: micro_batch × micro_batches. `rows` in files of earlier versions."""
    micro_batch: int = Field(ge=1, le=BATCH_MAX)
    """Sequences in a micro-batch."""
    micro_batches: int = Field(ge=1, le=BATCH_MAX)
    """Micro-batches in a step."""
    devices: list[list[DeviceId]]
    """devices[stage][tp]: 'node:device'. Stages on the same devices belong to one pipeline rank."""


class Predicted(Part):
    """The planner's prediction for a plan."""

    step_time_s: dict[str, float]
    """Seconds of a step by term; 'total' is the whole step time."""
    memory_bytes: dict[DeviceId, float]
    """Peak memory in bytes, by device."""
    bound_s: float | None = None
    """Lower bound in seconds: by the same cost model, no plan on these devices has a shorter step."""


class Rejected(Part):
    """A plan next to the chosen one, and why it was rejected."""

    change: str
    """How the neighbour differs from the plan."""
    delta_s: float | None = None
    """Seconds by which a step of the neighbour would be longer; absent when the neighbour cannot run at all."""
    reason: str
    """Why the neighbour was rejected, in one sentence."""


class Move(Part):
    """Blocks whose state moves to another device when this plan replaces another plan."""

    layers: tuple[int, int]
    """Blocks [from, to)."""
    source: DeviceId
    """Device that holds the state now, 'node:device'."""
    target: DeviceId
    """Device that will hold the state."""


class Plan(Document):
    """A complete plan: devices, cut, micro-batches, schedule and codec."""

    schema_kind: ClassVar[str] = "plan"

    topology_sha256: str | None = None
    """Content hash of the topology that the plan was made for."""
    run_sha256: str | None = None
    """Content hash of the resolved run file that the plan was made for."""
    provisional: bool = False
    """True when the plan was made before the nodes are known; such a plan is never run."""
    solver: str = "auto"
    """Name of the solver that made the plan."""
    pp: int = Field(ge=1, le=DEVICES_MAX)
    """Pipeline ranks of a replica."""
    dp: int = Field(ge=1, le=DEVICES_MAX)
    """Replicas."""
    tp: int = Field(ge=1, le=DEVICES_MAX)
    """Devices that share each matrix of a stage."""
    zero: ZeroLevel = 0
    """What is sharded over replicas (Rajbhandari et al. 2020): 0 nothing, 1 the optimizer state, 2 also gradients
    (summed after every micro-batch), 3 also weights (gathered for every forward and backward pass)."""
    shard: int | None = Field(default=None, ge=1)
    """Number of consecutive replicas that share one sharded state; each further group of replicas holds a copy (hybrid
    sharding). Default: all replicas."""
    sequence_parallel: bool = False
    """Norms and the residual stream are split along the sequence over tp (Korthikanti et al. 2022)."""
    schedule: ScheduleName = "1f1b"
    """Order in which each pipeline rank computes, unless `actions` states it."""
    stages: list[Stage] = Field(min_length=1)
    """The cut of the model, first blocks first."""
    replicas: list[Replica] = Field(min_length=1)
    """Copies of the model; they may differ in their share of the batch."""
    ranks: list[DeviceId]
    """Device of each global rank."""
    actions: dict[int, dict[int, list[str]]] = {}
    """actions[replica][pipeline rank]: the actions in order, such as '0F0', '0B0' (stage, kind, micro-batch). Where
    actions are left out, or do not cover the micro-batches, they are made from `schedule`; with schedule 'custom' they
    must be complete."""
    compression: list[CodecSpec] = Field(default=[CodecSpec()], min_length=1, max_length=1)
    """How gradients are reduced between replicas."""
    profile: CalibrationProfile | None = None
    """Measured steps on which `predicted` is based; left out: only the package's constants."""
    predicted: Predicted | None = None
    """The planner's prediction for this plan."""
    rejected: list[Rejected] = []
    """Rejected neighbours of the plan, the closest first."""
    moves: list[Move] = []
    """State that changes its device because this plan replaces another."""
    notes: list[str] = []
    """What you should know about how the plan was chosen."""
    made_sha256: str | None = None
    """Content hash of the plan as `hpctrain plan` wrote it, without this key. A file with other content was edited."""

    def stamped(self) -> Plan:
        """Return the plan with its own content hash, by which a later edit is detected."""
        return self.model_copy(update={"made_sha256": self._content_sha256()})

    @property
    def is_edited(self) -> bool:
        """Whether the plan was changed after `hpctrain plan` wrote it, or was written by something else."""
        return self.made_sha256 != self._content_sha256()

    def _content_sha256(self) -> str:
        return self.model_copy(update={"made_sha256": None}).sha256()

    @model_validator(mode="after")
    def _check(self) -> Plan:
        self._check_stages()
        self._check_replicas()
        self._check_sharding()
        self._check_actions()
        return self

    def _check_sharding(self) -> None:
        if self.shard is not None and (self.zero == 0 or self.dp % self.shard):
            raise ValueError(
                f"shard: found {self.shard}; it goes with zero 1 to 3 (found {self.zero}) and divides dp {self.dp}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel: found true with tp 1; it needs tp 2 or more")
        if self.zero >= 2 and len({replica.micro_batches for replica in self.replicas}) > 1:
            counts = ", ".join(str(replica.micro_batches) for replica in self.replicas)
            raise ValueError(
                f"zero: found {self.zero} with {counts} micro-batches by replica; gradients are then summed after "
                "every micro-batch, so all replicas need as many; use zero 0 or 1, or sizes instead of numbers"
            )
        if self.zero:
            self._check_shard_order()

    def _check_shard_order(self) -> None:
        # torch orders the ranks of a process group by global rank, and shards follow that order.
        for column in self.mesh():
            for members in zip(*column, strict=True):
                if list(members) != sorted(members):
                    devices = ", ".join(self.ranks[rank] for rank in members)
                    raise ValueError(
                        f"ranks: with zero {self.zero} the devices that share a state stand in order of their "
                        f"replicas; found {devices}"
                    )

    def _check_actions(self) -> None:
        for replica, rows in self.actions.items():
            if not 0 <= replica < self.dp:
                raise ValueError(f"actions: found replica {replica}, allowed: 0 to {self.dp - 1}")
            for rank, row in rows.items():
                if not 0 <= rank < self.pp:
                    raise ValueError(f"actions[{replica}]: found pipeline rank {rank}, allowed: 0 to {self.pp - 1}")
                for text in row:
                    try:
                        Action.parse(text)
                    except ValueError as error:
                        raise ValueError(f"actions[{replica}][{rank}]: {error}") from None

    def _check_stages(self) -> None:
        expected = 0
        last = len(self.stages) - 1
        for index, stage in enumerate(self.stages):
            start, stop = stage.layers
            if start != expected or stop < start:
                raise ValueError(f"stages[{index}].layers: found [{start}, {stop}), expected it to start at {expected}")
            if start == stop and index not in (0, last):
                raise ValueError(f"stages[{index}].layers: found no block; only the first and last stage may be empty")
            expected = stop
        if self.stages[last].messages != "none":
            raise ValueError(
                f"stages[{last}].messages: found {self.stages[last].messages}; the last stage has no next one, so only "
                "none is allowed"
            )
        if len(self.stages) < self.pp:
            raise ValueError(f"stages: found {len(self.stages)}, allowed: at least one for each of pp {self.pp}")
        if len(self.replicas) != self.dp:
            raise ValueError(f"replicas: found {len(self.replicas)}, dp is {self.dp}")

    def _check_replicas(self) -> None:
        used: list[DeviceId] = []
        for index, replica in enumerate(self.replicas):
            where = f"replicas[{index}]"
            if replica.sequences != replica.micro_batch * replica.micro_batches:
                raise ValueError(
                    f"{where}.sequences: found {replica.sequences}, but micro_batch {replica.micro_batch} × "
                    f"micro_batches {replica.micro_batches} is {replica.micro_batch * replica.micro_batches}"
                )
            if len(replica.devices) != len(self.stages):
                raise ValueError(
                    f"{where}.devices: found {len(replica.devices)} rows, there are {len(self.stages)} stages"
                )
            for stage, row in enumerate(replica.devices):
                if len(row) != self.tp:
                    raise ValueError(f"{where}.devices[{stage}]: found {len(row)} devices, tp is {self.tp}")
            rows = list(dict.fromkeys(tuple(row) for row in replica.devices))
            if len(rows) != self.pp:
                raise ValueError(f"{where}.devices: its stages lie on {len(rows)} sets of devices, pp is {self.pp}")
            used += [device for row in rows for device in row]
        if len({tuple(self._owners(replica)) for replica in range(self.dp)}) > 1:
            owners = "; ".join(", ".join(map(str, self._owners(replica))) for replica in range(self.dp))
            raise ValueError(
                f"replicas: their stages lie on pipeline ranks {owners}; allowed: the same ranks in every replica"
            )
        if len(set(used)) != len(used):
            twice = sorted({device for device in used if used.count(device) > 1})
            raise ValueError(f"replicas: a device is used twice: {', '.join(twice)}")
        if sorted(used) != sorted(self.ranks):
            raise ValueError(
                f"ranks: found {', '.join(self.ranks)}; expected exactly the devices of the replicas, in any order: "
                f"{', '.join(used)}"
            )

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(self.pp, self.dp, self.tp)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def shards(self) -> int:
        """Number of replicas over which the optimizer state is sharded; 1: every replica holds all of it."""
        return 1 if self.zero == 0 else self.shard or self.dp

    @property
    def codec_reduces_replicate_axis(self) -> bool:
        """Whether the codec sums gradients between the copies of a sharded state, and not among the replicas that share
        one copy."""
        return 1 < self.shards < self.dp and not self.codec.exact

    @property
    def codec(self) -> Codec:
        """How gradients are reduced between replicas."""
        return self.compression[0].codec

    @property
    def reduction_sha256(self) -> str:
        """Return the hash of everything that decides which state a rank's reducer has between steps: mesh, cut,
        sharding and codec, but not the devices."""
        parts = [*self.dims, self.zero, self.shards, self.sequence_parallel, list(self.stage_owner().values())]
        codecs = [[spec.level, spec.codec.to_json()] for spec in self.compression]
        text = json.dumps([*parts, [stage.layers for stage in self.stages], codecs])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def memory_options_text(self) -> list[str]:
        """Return the memory options of the plan in words; empty where it has none."""
        options = []
        if self.zero:
            copies = f", {self.dp // self.shards} copies" if self.shards < self.dp else ""
            options.append(f"zero {self.zero} over {self.shards} replicas{copies}")
        if self.sequence_parallel:
            options.append("sequence parallel")
        kinds = [stage.recompute for stage in self.stages]
        if set(kinds) == {kinds[0]} != {"none"}:
            options.append(f"recompute {kinds[0]}")
        elif len(set(kinds)) > 1:
            options.append(f"recompute by stage: {', '.join(kinds)}")
        return options

    @property
    def sequences(self) -> int:
        """Sequences in a step, over all replicas."""
        return sum(replica.sequences for replica in self.replicas)

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        return self.stages[-1].layers[1]

    @cached_property
    def nodes(self) -> list[str]:
        """Nodes of the plan, in order of rank."""
        return list(dict.fromkeys(device_id.node for device_id in self.ranks))

    def pipeline_rank_devices(self, replica: int) -> list[tuple[DeviceId, ...]]:
        """Return the devices of each pipeline rank of a replica: [pp][tp]."""
        return list(dict.fromkeys(tuple(row) for row in self.replicas[replica].devices))

    def stage_owner(self) -> dict[int, int]:
        """Return the pipeline rank of each stage, the same in every replica."""
        return dict(enumerate(self._owners(0)))

    def _owners(self, replica: int) -> list[int]:
        """Return the pipeline rank of each stage of a replica."""
        rows = self.pipeline_rank_devices(replica)
        return [rows.index(tuple(row)) for row in self.replicas[replica].devices]

    def messages(self, replica: int, stage: int) -> Messages:
        """Return how messages between a stage and the next are encoded in a replica. Devices that share a stage hold
        the same numbers, so all of them use one encoding, even where only some pairs cross nodes."""
        devices = self.replicas[replica].devices
        if stage == len(devices) - 1:
            return "none"
        pairs = zip(devices[stage], devices[stage + 1], strict=True)
        apart = any(a.node != b.node for a, b in pairs)
        return self.stages[stage].messages if apart else "none"

    def mesh(self) -> list[list[list[int]]]:
        """Return the global ranks as nested lists [pp][dp][tp]."""
        rank = {device_id: index for index, device_id in enumerate(self.ranks)}
        return [
            [[rank[device_id] for device_id in self.pipeline_rank_devices(replica)[pp]] for replica in range(self.dp)]
            for pp in range(self.pp)
        ]

    def table(self, replica: int) -> Schedule | None:
        """Return the stated actions of a replica as a schedule; None where they follow from `schedule`."""
        rows = self.actions.get(replica)
        if rows is None:
            return None
        return Schedule.parse(rows.get(rank, []) for rank in range(self.pp))
