"""How often attention that is not fused reads and writes its scores in memory, counted in a trace of its operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tools.published_runs.gpt_spec import PLAIN_PASSES, GptSpec

ROWS, HEADS, SEQ, WIDTH = 1, 2, 64, 8
FREE = ("view", "detach", "transpose", "squeeze", "as_strided", "empty", "new_empty_strided")
"""Operations that touch no number."""


class ScorePasses(TorchDispatchMode):
    """Counts reads and writes of tensors of the scores' size."""

    passes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name in FREE:
            return result
        read = sum(isinstance(each, Tensor) and each.numel() == ROWS * HEADS * SEQ * SEQ for each in args)
        written = int(isinstance(result, Tensor) and result.numel() == ROWS * HEADS * SEQ * SEQ)
        if name == "masked_fill" and not func.overloadpacket.__name__.endswith("_"):
            read, written = 2, 2  # a copy, which is then filled in place
        if name in ("copy", "baddbmm"):
            read -= 1  # its first argument is only written
        self.passes += read + written
        return result


@pytest.mark.slow
def test_scores_are_touched_as_often_as_the_operations_of_plain_attention_do() -> None:
    query, key, value = (torch.randn(ROWS * HEADS, SEQ, WIDTH, requires_grad=True) for _ in range(3))
    later = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    counted = []
    with ScorePasses() as trace:
        scores = torch.baddbmm(torch.empty(ROWS * HEADS, SEQ, SEQ), query, key.transpose(1, 2), beta=0.0)
        masked = scores.view(ROWS, HEADS, SEQ, SEQ).masked_fill_(later, -1e4)
        result = torch.bmm(torch.softmax(masked, -1).view(ROWS * HEADS, SEQ, SEQ), value)
        counted.append(trace.passes)
        result.sum().backward()
        counted.append(trace.passes - counted[0])
    assert tuple(counted) == PLAIN_PASSES
    spec = GptSpec(
        layers=1, dim=HEADS * WIDTH, heads=HEADS, ffn_dim=8, vocab=8, positions=SEQ, dropout=False, plain=True
    )
    assert spec.touched_score_bytes(ROWS, SEQ) == tuple(4 * ROWS * HEADS * SEQ * SEQ * count for count in counted)
