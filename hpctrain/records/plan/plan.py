"""plan.json: which device computes which blocks of which sequences, and in which order. The workers obey it exactly."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AliasChoices, Field, model_validator

from hpctrain.records.format.document import BATCH_MAX, DEVICES_MAX, LAYERS_MAX, Document, Part
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import Codec
from hpctrain.records.plan.gradient_codec import IntraNode, Messages, TensorParallelSums
from hpctrain.records.plan.levels import check_levels, check_tensor_parallel_sums, consecutive_per_node
from hpctrain.records.plan.prediction import Move, Predicted, Rejected
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.plan.schedule import Action, Schedule

_REDUCER_STATE = 2
"""Version of the names in the state that reducers keep between steps."""


class ParallelDims(NamedTuple):
    """The degrees of a plan: pp (pipeline ranks of a replica), dp (replicas) and tp (devices that share each
    matrix)."""

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
    """A stage: consecutive blocks that one device holds, or tp devices together."""

    layers: tuple[LayerNumber, LayerNumber]
    """Blocks [from, to). The first stage also holds the embedding, the last the head; either may have no block."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again. none: no activations. selective: all but the results of matrix
    products and attention. full: all within a block."""
    messages: Messages = "none"
    """How stage messages between this stage and the next are sent, if the two stages are on different nodes. none: in
    fp32. bf16: in bfloat16. int8: as integers of 8 bits with a scale for each 256 of them."""


class Replica(Part):
    """One copy of the model: its devices, and its share of each global batch."""

    sequences: int = Field(ge=1, le=BATCH_MAX, validation_alias=AliasChoices("sequences", "rows"))
    """Sequences of each global batch that the replica computes: micro_batch × micro_batches. Earlier versions called
    this key `rows`."""
    micro_batch: int = Field(ge=1, le=BATCH_MAX)
    """Sequences in a micro-batch."""
    micro_batches: int = Field(ge=1, le=BATCH_MAX)
    """Micro-batches of the replica in a step."""
    devices: list[list[DeviceId]]
    """devices[stage][tp]: device ids ('node:device') of the devices that hold the stage. Stages on the same devices
    belong to one pipeline rank."""


class Plan(Document):
    """plan.json: a complete plan with devices, cut, micro-batches, schedule and codec."""

    schema_kind: ClassVar[str] = "plan"
    later_fields = frozenset({"tensor_parallel_sums"})

    topology_sha256: str | None = None
    """SHA-256 of the content of the topology that the plan was made for."""
    run_sha256: str | None = None
    """SHA-256 of the content of the run file, with all keys resolved, that the plan was made for."""
    provisional: bool = False
    """Whether the plan was made before the nodes were known; such a plan is never run."""
    solver: str = "auto"
    """Name of the solver that made the plan."""
    pp: int = Field(ge=1, le=DEVICES_MAX)
    """Pipeline ranks of a replica."""
    dp: int = Field(ge=1, le=DEVICES_MAX)
    """Number of replicas."""
    tp: int = Field(ge=1, le=DEVICES_MAX)
    """Devices that share each matrix of a stage."""
    zero: ZeroLevel = 0
    """What is sharded over replicas (Rajbhandari et al. 2020): 0 nothing, 1 the optimizer state, 2 also gradients
    (summed after every micro-batch), 3 also weights (gathered for every forward and backward pass)."""
    shard: int | None = Field(default=None, ge=1)
    """Number of consecutive replicas that share one sharded state; each further group of replicas holds a copy (hybrid
    sharding). Default: all replicas."""
    sequence_parallel: bool = False
    """Whether norms and the residual stream are split along the sequence over the tp devices (Korthikanti et al.
    2022)."""
    schedule: ScheduleName = "1f1b"
    """Name of the schedule: the order in which each pipeline rank computes, unless `actions` states it."""
    stages: list[Stage] = Field(min_length=1)
    """The stages of the model, in order of their blocks."""
    replicas: list[Replica] = Field(min_length=1)
    """Copies of the model; they may differ in their share of the global batch."""
    ranks: list[DeviceId]
    """Device id of each rank, in order of rank."""
    actions: dict[int, dict[int, list[str]]] = {}
    """actions[replica][pipeline rank]: the actions in order, such as '0F0', '0B0' (stage, kind, micro-batch). If a
    replica's actions are left out, or do not cover its micro-batches, they are made from `schedule`. With schedule
    'custom', all actions must be given."""
    compression: list[CodecSpec] = Field(default=[CodecSpec()], min_length=1, max_length=2)
    """How gradients are reduced between replicas: one entry with level dp, for all replicas alike, or two by level.
    With level intra_node, the replicas of a node sum gradients among themselves, and each gets the sums of a part of
    them. With level inter_node, the nodes sum these parts with the codec. With hybrid sharding and a codec that is not
    exact, one entry means the same: the replicas that share a state sum exactly."""
    tensor_parallel_sums: TensorParallelSums = "none"
    """How tensor-parallel groups that span nodes sum activations and their gradients in training. none: exactly. bf16:
    in the numbers' own format within a node, then in bfloat16 between nodes."""
    profile: CalibrationProfile | None = None
    """Factors from measured steps, with which `predicted` was computed. Absent: it was computed only with constants of
    hpctrain."""
    predicted: Predicted | None = None
    """The planner's prediction for this plan."""
    rejected: list[Rejected] = []
    """Rejected neighbours of the plan, each with the reason why it was not chosen."""
    moves: list[Move] = []
    """State that changes its device because the plan replaces another plan."""
    notes: list[str] = []
    """Remarks of the planner on how the plan was chosen."""
    made_sha256: str | None = None
    """SHA-256 of the content of the plan as the planner wrote it, without this key. A file with other content was
    edited."""

    def stamped(self) -> Plan:
        """Return the plan with the SHA-256 of its content in `made_sha256`, by which a later edit is detected."""
        return self.model_copy(update={"made_sha256": self._content_sha256()})

    @property
    def is_edited(self) -> bool:
        """Return whether the plan was changed after the planner wrote it, or was not written by the planner."""
        return self.made_sha256 != self._content_sha256()

    def _content_sha256(self) -> str:
        return self.model_copy(update={"made_sha256": None}).sha256()

    @model_validator(mode="after")
    def _check(self) -> Plan:
        self._check_stages()
        self._check_replicas()
        self._check_sharding()
        per_node = self._replicas_per_node if len(self.compression) > 1 else 1
        check_levels(self.compression, self.dp, self.shards, per_node)
        if self.tensor_parallel_sums != "none":
            check_tensor_parallel_sums(self._tensor_parallel_nodes)
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
        if self.zero or len(self.compression) > 1:
            self._check_shard_order()

    def _check_shard_order(self) -> None:
        # torch orders the ranks of a process group by global rank, and shards follow that order.
        for column in self.mesh():
            for members in zip(*column, strict=True):
                if list(members) != sorted(members):
                    devices = ", ".join(self.ranks[rank] for rank in members)
                    raise ValueError(
                        f"ranks: with zero {self.zero} and {len(self.compression)} levels of compression, the devices "
                        "that hold parts of one state or of one sum stand in order of their replicas; found "
                        f"{devices}"
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
        """Return the number of replicas over which the optimizer state is sharded; 1 means that every replica holds the
        whole state."""
        return 1 if self.zero == 0 else self.shard or self.dp

    @property
    def codec_reduces_replicate_axis(self) -> bool:
        """Return whether the codec sums gradients only between the copies of a sharded state. This is so with hybrid
        sharding, unless all sums are exact in one level: torch then sums over all replicas."""
        return 1 < self.shards < self.dp and self.level_replicas > 1

    @property
    def level_replicas(self) -> int:
        """Return the number of consecutive replicas that sum gradients among themselves first. Each of them gets the
        sums of a part of the gradients; the codec then sums this part over all such groups of replicas. 1: there is one
        level, in which all replicas sum alike."""
        if 1 < self.shards < self.dp:
            return 1 if self.codec.exact and len(self.compression) == 1 else self.shards
        return 1 if len(self.compression) == 1 else self._replicas_per_node

    @property
    def part_replicas(self) -> int:
        """Return the number of parts into which the replicas of a node cut each gradient, so that each of them sums one
        part between nodes. 1: they do not, or the state is sharded."""
        return self.level_replicas if self.shards == 1 else 1

    @cached_property
    def _replicas_per_node(self) -> int:
        nodes = [device_id.node for device_id in self.ranks]
        return consecutive_per_node(
            [tuple(nodes[rank] for rank in sorted(row)) for row in column] for column in self.mesh()
        )

    @property
    def tp_per_node(self) -> int:
        """Return the number of consecutive devices of each tensor-parallel group that share a node; 1 if it is not the
        same everywhere."""
        return consecutive_per_node(self._tensor_parallel_nodes)

    @property
    def _tensor_parallel_nodes(self) -> list[list[str]]:
        """Return the nodes of the devices of each tensor-parallel group, in the order of ranks."""
        return [[self.ranks[rank].node for rank in sorted(row)] for column in self.mesh() for row in column]

    @property
    def codec(self) -> Codec:
        """Return the codec with which gradients are reduced between replicas, or between nodes."""
        return self.compression[-1].codec

    @property
    def intra_node(self) -> IntraNode:
        """Return how the replicas of a node sum gradients among themselves before the codec sums over the nodes; flat:
        there is one level."""
        if len(self.compression) == 1:
            return "flat"
        return "bf16" if self.compression[0].codec.mode == "bf16" else "none"

    @property
    def reduction_sha256(self) -> str:
        """Return the SHA-256 of everything in the plan that decides which state a rank's reducer keeps between steps:
        degrees, cut, pipeline ranks of the stages, sharding, sequence parallelism, codec, and with two levels the
        replicas of a node, but not the devices."""
        parts = [*self.dims, self.zero, self.shards, self.sequence_parallel, list(self.stage_owner().values())]
        if len(self.compression) > 1:
            parts.append(self.level_replicas)
        codecs = [[spec.level, spec.codec.to_json()] for spec in self.compression]
        text = json.dumps([_REDUCER_STATE, *parts, [stage.layers for stage in self.stages], codecs])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def sequences(self) -> int:
        """Return the number of sequences in a step, over all replicas."""
        return sum(replica.sequences for replica in self.replicas)

    @property
    def layers(self) -> int:
        """Return the number of blocks of the model."""
        return self.stages[-1].layers[1]

    @cached_property
    def nodes(self) -> list[str]:
        """Return the names of the nodes that the plan uses, each once, in order of their lowest rank."""
        return list(dict.fromkeys(device_id.node for device_id in self.ranks))

    def pipeline_rank_devices(self, replica: int) -> list[tuple[DeviceId, ...]]:
        """Return the devices of a replica, as [pipeline rank][tp]."""
        return list(dict.fromkeys(tuple(row) for row in self.replicas[replica].devices))

    def stage_owner(self) -> dict[int, int]:
        """Return stage -> its pipeline rank, which is the same in every replica."""
        return dict(enumerate(self._owners(0)))

    def _owners(self, replica: int) -> list[int]:
        """Return the pipeline rank of each stage of a replica, in order of stages."""
        rows = self.pipeline_rank_devices(replica)
        return [rows.index(tuple(row)) for row in self.replicas[replica].devices]

    def messages(self, replica: int, stage: int) -> Messages:
        """Return the encoding of messages between a stage and the next stage of a replica: "none" unless the stages are
        on different nodes. If only some of the tp devices send to another node, all of them use the same encoding,
        because they have to hold the same numbers."""
        devices = self.replicas[replica].devices
        if stage == len(devices) - 1:
            return "none"
        pairs = zip(devices[stage], devices[stage + 1], strict=True)
        apart = any(a.node != b.node for a, b in pairs)
        return self.stages[stage].messages if apart else "none"

    def mesh(self) -> list[list[list[int]]]:
        """Return the ranks of the plan as nested lists [pp][dp][tp]."""
        rank = {device_id: index for index, device_id in enumerate(self.ranks)}
        return [
            [[rank[device_id] for device_id in self.pipeline_rank_devices(replica)[pp]] for replica in range(self.dp)]
            for pp in range(self.pp)
        ]

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """Return pipeline rank, number of the replica and tensor-parallel rank of a global rank, each from 0. The
        tensor-parallel ranks of a group follow its ascending global ranks.

        Raises:
            ValueError: the plan has fewer ranks.
        """
        for pp, column in enumerate(self.mesh()):
            for dp, row in enumerate(column):
                if rank in row:
                    return pp, dp, sorted(row).index(rank)
        raise ValueError(f"rank {rank} is not in a plan of {self.world_size} ranks")

    def table(self, replica: int) -> Schedule | None:
        """Return the actions that the plan states for a replica, as a schedule; None if the plan states none, so that
        they follow from the name of its schedule."""
        rows = self.actions.get(replica)
        if rows is None:
            return None
        return Schedule.parse(rows.get(rank, []) for rank in range(self.pp))
