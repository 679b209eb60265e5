"""A pipeline schedule as data: the order in which each pipeline rank computes its actions.

An action is written as in torch.distributed.pipelining: '2F0' is stage 2, forward, micro-batch 0. B is the whole
backward, I the backward for inputs, W the backward for weights. Sends and receives follow from the actions.
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
    """F: forward. B: whole backward. I: backward for inputs. W: backward for weights."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text such as '2F0' stands for.

        Raises:
            ValueError: the text is no action.
        """
        match = _TEXT.match(text)
        if not match:
            raise ValueError(f"found {text!r}; an action is written like 0F3: stage, one of F B I W, micro-batch")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """An action table: the actions of each pipeline rank, in order."""

    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, rows: Iterable[Iterable[str]]) -> Schedule:
        """Return the schedule whose actions are given as texts, such as '2F0': a row for each pipeline rank, with its
        actions in order.

        Raises:
            ValueError: a text is no action.
        """
        return cls(tuple(tuple(Action.parse(text) for text in row) for row in rows))

    def rows(self) -> list[list[str]]:
        """Return the actions as texts, such as '2F0': a row for each pipeline rank, with its actions in order."""
        return [[str(action) for action in row] for row in self.ranks]

    def stages(self) -> int:
        """Return the number of stages in the schedule."""
        return 1 + max((action.stage for row in self.ranks for action in row), default=-1)

    def owner(self) -> dict[int, int]:
        """Return stage -> its pipeline rank."""
        return {action.stage: rank for rank, row in enumerate(self.ranks) for action in row}
