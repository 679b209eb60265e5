"""With 1F1B, the memory of a rank does not depend on the number of micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_cases
from stage_memory_cases import SEQ_LEN, SEQUENCES, SPEC

from hpctrain.launch import small_run

SCRIPT = Path(__file__).with_name("stage_memory_cases.py")
FEW, MANY = 8, 64


@pytest.mark.slow
def test_memory_does_not_grow_with_micro_batches(tmp_path: Path) -> None:
    small_run.make_corpus(tmp_path / "corpus")
    peaks = []
    for micro_batches in (FEW, MANY):
        folder = tmp_path / str(micro_batches)
        small_run.make_run(folder, tmp_path / "corpus", SPEC, SEQUENCES * micro_batches, SEQ_LEN)
        peaks.append(run_cases(SCRIPT, str(micro_batches), 2, folder)["peaks"])
    # torch would keep at least three messages for each further micro-batch on the first rank, and the logits, too, on
    # the last. Peaks of equal steps differ by some 30 MB, and still grow by less than one message for each micro-batch.
    message_bytes = SEQUENCES * SEQ_LEN * SPEC.dim * 4
    for few, many in zip(*peaks, strict=True):
        assert many - few < 2 * message_bytes * (MANY - FEW)
