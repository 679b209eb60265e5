"""A model of a user's own that trains slowly until a file says otherwise, so that a run cannot end too soon."""

from __future__ import annotations

import shutil
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_model" / "code"
CODE = """
import time
from pathlib import Path

import gpt
from torch import Tensor


class GatedEmbedding(gpt.Embedding):
    gate: Path
    passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        # The first passes are those that the model is measured by, and those that a test waits for.
        if self.passes > 30 and not self.gate.exists():
            time.sleep(1)
        return super().forward(tokens)


def make(vocabulary: int, seq_len: int, gate: str, **sizes: int) -> gpt.GPT:
    model = gpt.make(vocabulary, seq_len, **sizes)
    model.embedding.__class__ = GatedEmbedding
    model.embedding.gate = Path(gate)
    return model
"""
"""Each forward pass takes a second while the gate is closed: 150 steps take two minutes and more."""


class GatedModel:
    """The example of docs/own-model.md with a gate, written into a project's folder."""

    def __init__(self, project: Path) -> None:
        code = project / "code"
        shutil.copytree(EXAMPLE, code, dirs_exist_ok=True)
        (code / "gated.py").write_text(CODE)
        self.gate = project / "gate"
        self.gate.unlink(missing_ok=True)

    @property
    def settings(self) -> tuple[str, ...]:
        """What `submit --set` takes for two nodes, with one pass a step."""
        sizes = f"layers: 2, dim: 32, heads: 2, dropout: 0.0, gate: {self.gate}"
        return (
            "code=code",
            f"model={{import: 'gated:make', args: {{{sizes}}}}}",
            "parallel={mode: fixed, dp: 2, micro_batch: 6}",
        )
