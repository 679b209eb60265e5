"""What a worker says of an error: its kind, its whole message, and the line where the person can change something."""

from __future__ import annotations

import errno
import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.worker.train import Failure, failure_of

AT = "rank 3 in step 7, forward stage 0 micro-batch 1"
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return nn.functional.linear(x, torch.zeros(3, 5))


def look_up(table, word):
    return table[word]
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "net.py").write_text(MODEL)
    return tmp_path / "code"


def caught(code: Path, name: str, *args: object) -> Failure:
    program = runpy.run_path(str(code / "net.py"))
    try:
        program[name](*args)
    except Exception as error:
        return failure_of(error)
    raise AssertionError("nothing was raised")


def test_the_line_is_the_persons_and_not_the_one_within_torch(code: Path) -> None:
    net: type[nn.Module] = runpy.run_path(str(code / "net.py"))["Net"]
    try:
        net()(torch.zeros(2, 4))
    except RuntimeError as error:
        failure = failure_of(error)
    assert failure.kind == "RuntimeError"
    assert failure.where == f"{code}/net.py:8 in forward"
    assert "mat1 and mat2 shapes cannot be multiplied (2x4 and 5x3)" in failure.message
    said = failure.sentence(AT)
    line = f"line 8 of {code}/net.py: return nn.functional.linear(x, torch.zeros(3, 5))"
    assert said == f"{AT}: RuntimeError: {failure.message} ({line})"


def test_the_kind_says_what_the_message_alone_does_not(code: Path) -> None:
    failure = caught(code, "look_up", {}, "night")
    assert failure.sentence(AT) == f"{AT}: KeyError: 'night' (line 12 of {code}/net.py: return table[word])"


def test_what_torchs_pipeline_wraps_is_the_error(code: Path) -> None:
    from torch.distributed.pipelining import PipelineStage

    net = runpy.run_path(str(code / "net.py"))["Net"]()
    stage = object.__new__(PipelineStage)
    try:
        raise_as_torch_does(stage, net)
    except RuntimeError as error:
        failure = failure_of(error)
    assert failure.where == f"{code}/net.py:8 in forward"
    assert failure.message.startswith("mat1 and mat2")


def raise_as_torch_does(stage: object, net: nn.Module) -> None:
    """The function that wraps is compiled under the name of a file of torch, as the pipeline's is."""
    source = """
def forward_one_chunk(net, x):
    try:
        net(x)
    except Exception as e:
        raise RuntimeError("[Stage 0] failed to run forward: args: ...") from e
"""
    scope: dict[str, object] = {}
    place = Path(torch.__file__).parent / "distributed" / "pipelining" / "stage.py"
    exec(compile(source, str(place), "exec"), scope)
    scope["forward_one_chunk"](net, torch.zeros(2, 4))  # type: ignore[operator]


def test_a_wrapping_of_the_persons_own_stays(code: Path) -> None:
    try:
        try:
            {}["a"]
        except KeyError as error:
            raise ValueError("no shard of that name: a\nhave: b, c") from error
    except ValueError as error:
        failure = failure_of(error)
    assert (failure.kind, failure.message) == ("ValueError", "no shard of that name: a\nhave: b, c")
    # A reason is one line; the message stays whole.
    assert "ValueError: no shard of that name: a have: b, c (" in failure.sentence(AT)


def test_cuda_errors_are_told_without_the_advice_that_torch_adds(code: Path) -> None:
    text = (
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.\n"
    )
    failure = failure_of(torch.AcceleratorError(text))
    assert failure.fault.name == "gpu_memory_error"
    assert failure.sentence(AT) == (
        f"{AT}: AcceleratorError: CUDA error: uncorrectable ECC error encountered (place unknown) "
        "[uncorrectable memory error of a GPU]"
    )


def test_errors_that_are_meant_for_a_person_stay_as_they_are(code: Path) -> None:
    failure = failure_of(HpctrainError("step 8: the loss is nan; lower optimizer.lr"))
    assert failure.sentence(AT) == "step 8: the loss is nan; lower optimizer.lr"


def test_long_messages_are_bounded(code: Path) -> None:
    failure = failure_of(RuntimeError("x" * 100_000))
    assert len(failure.message) == 8000
    assert len(failure.sentence(AT)) < 1200


def test_a_time_out_of_the_persons_own_loses_no_rank(code: Path) -> None:
    (code / "net.py").write_text("def fetch():\n    raise RuntimeError('download timed out')\n")
    assert caught(code, "fetch").fault.name == "exception"
    (code / "net.py").write_text("def fetch():\n    raise RuntimeError('CUDA error: device-side assert triggered')\n")
    assert caught(code, "fetch").fault.name == "device_assert"


def test_what_stands_behind_an_error_says_whose_fault_it_is() -> None:
    with pytest.raises(StorageError) as raised, storage_errors(Path("/data/metrics.jsonl")):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert failure_of(raised.value).fault.name == "disk_full"


def test_an_exit_of_the_persons_code_is_an_error_too(code: Path) -> None:
    (code / "net.py").write_text("import sys\n\n\ndef leave():\n    sys.exit(3)\n")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(code / "net.py"))["leave"]()
    assert failure_of(left.value).sentence(AT) == f"{AT}: SystemExit: 3 (line 5 of {code}/net.py: sys.exit(3))"
