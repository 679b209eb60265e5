"""A pipeline schedule as data: which micro-batch each pipeline rank computes when.

The text form is that of torch's pipeline actions: '2F0' is stage 2, forward, micro-batch 0; B is the full backward, I
the backward for inputs only, W the one for weights only. Sends and receives follow from these actions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_TEXT = re.compile(r"^(\d+)([FBIW])(\d+)$")


class Action(NamedTuple):
    """One unit of computation: a stage, the kind of pass, and a micro-batch."""

    stage: int
    kind: str
    """F forward, B full backward, I backward for inputs, W backward for weights."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text form stands for.

        Raises:
            ValueError: the text is no action.
        """
        match = _TEXT.match(text)
        if not match:
            raise ValueError(f"found {text!r}; an action is written like 0F3: stage, one of F B I W, micro-batch")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The order of actions on each pipeline rank."""

    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, rows: Iterable[Iterable[str]]) -> Schedule:
        """Return the schedule of a text form, one row per pipeline rank."""
        return cls(tuple(tuple(Action.parse(text) for text in row) for row in rows))

    def rows(self) -> list[list[str]]:
        """Return the text form, one row per pipeline rank."""
        return [[str(action) for action in row] for row in self.ranks]

    def stages(self) -> int:
        """Return the number of stages in the schedule."""
        return 1 + max((action.stage for row in self.ranks for action in row), default=-1)

    def owner(self) -> dict[int, int]:
        """Return the pipeline rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.ranks) for action in row}
