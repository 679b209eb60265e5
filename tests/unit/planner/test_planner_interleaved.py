"""What bounds know of interleaved 1f1b, against the tables themselves."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.planner.bounds.interleaved_ranks import round_counts
from hpctrain.schedule.generate import make_schedule


@pytest.mark.parametrize("pp", [2, 3, 4, 7])
def test_what_is_done_around_a_pass_is_what_tables_do(pp):
    for count in range(1, 4 * pp):
        found = round_counts(pp, np.array([count]))
        for rank, row in enumerate(make_schedule("interleaved_1f1b", pp, 2 * pp, count).ranks):
            kinds = [action.kind for action in row]
            before = row[: kinds.index("B")]
            last = max(at for at, action in enumerate(row) if action.kind == "B" and action.stage == pp + rank)
            assert found.before[rank] == sum(action.stage == rank for action in before)
            assert found.between[rank] == sum(action.stage != rank for action in before)
            assert found.after[rank] == len(row) - 1 - last
