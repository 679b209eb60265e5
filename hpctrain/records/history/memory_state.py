"""Models of the training state in memory: the part of a rank that a node holds, and the parts from which a generation
starts."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from hpctrain.records.format.document import DEVICES_MAX, Part
from hpctrain.records.format.file_name import PathBelow
from hpctrain.records.format.node_name import NODE_NAME

StateKind = Literal["live", "snapshot", "guest"]
"""`live`: the state that a worker trained on. `snapshot`: a copy of it, made between two steps. `guest`: the snapshot
of a rank of another node."""

KINDS: tuple[StateKind, ...] = get_args(StateKind)
Number = Annotated[int, Field(ge=0, lt=1 << 63)]


class HeldState(Part):
    """A rank's part of the training state in memory of a node, as its agent reads it after the worker has ended."""

    generation: Number
    """Generation in which the segments were filled. A generation whose ranks all continue on the segments of the
    generation before leaves this number as it is."""
    plan_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the plan that the rank belongs to."""
    rank: Annotated[int, Field(ge=0, lt=DEVICES_MAX)]
    """Rank whose part it is."""
    kind: StateKind = "live"
    """How this part came into the node's memory."""
    step: Number
    """Optimizer steps that are complete in this part."""
    finishable: bool = False
    """Whether the gradients of step `step` + 1 are complete, so that another process can finish that step."""
    norm_step: Number = 0
    """Newest step whose gradient norm is in this part; 0 without one. If it is `step` + 1, the update of that step may
    have begun, and the state of step `step` is gone."""
    size_bytes: Number
    """Size of the segment."""

    def reaches(self, step: int) -> bool:
        """Return whether this part has the training state of a step, or is one step behind and has all gradients of the
        step, so that another process can finish the step's update. The update also needs the gradient norm of the step,
        which any part of the same plan may have; whether one has it is not checked here."""
        begun = self.norm_step > self.step
        return (self.step == step and not begun) or (self.step == step - 1 and self.finishable)


class StateHolder(Part):
    """The node that holds the part of one rank of an old plan."""

    rank: Annotated[int, Field(ge=0, lt=DEVICES_MAX)]
    """Rank of the old plan."""
    node: str = Field(pattern=NODE_NAME)
    """Node in whose memory the part is."""
    kind: StateKind = "live"
    """How the part came into the node's memory."""


class MemorySource(Part):
    """State in memory from which a generation starts, in place of a checkpoint."""

    generation: Number
    """Generation in which the segments were filled."""
    plan: PathBelow
    """File of the plan of the segments, within the run folder."""
    step: Number
    """Step from which the generation continues; parts that are one step behind are finished first."""
    continued: Annotated[list[Annotated[int, Field(ge=0, lt=DEVICES_MAX)]], Field(max_length=DEVICES_MAX)] = []
    """Rank of the generation -> the rank of the old plan on whose segment it continues: one that its node holds, with
    the same part of the state. []: new segments are filled from the old ones."""
    holders: Annotated[list[StateHolder], Field(min_length=1, max_length=DEVICES_MAX)]
    """The nodes with the parts that are read, and which parts these are."""
