"""A Hugging Face folder of none of our families: transformers is asked, and what is said about its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hpctrain.base.errors import CommandTimeoutError, FileError, InputError
from hpctrain.base.process import CommandResult, Process
from hpctrain.hf.folder import hf_warnings, with_hf_folder
from hpctrain.launch.preflight.prepare import built_by_transformers
from hpctrain.records.model.hf_model import HfModel
from hpctrain.records.model.measured_stack import PartSizes
from hpctrain.records.model.transformers_spec import TransformersSpec
from hpctrain.records.run.run import Run

SIZES = PartSizes(parameters=10, flops=10, activation_bytes=10)
SPEC = TransformersSpec(
    architecture="NewForCausalLM", because="hpctrain has no such family", blocks="model.layers", layers=2, dim=8,
    front=["model.embed"], back=["head"], front_tensors={"model.embed.weight": [9, 8]}, block_tensors={"w": [8, 8]},
    back_tensors={"head.weight": [9, 8]}, seq_len=64, vocab=9, front_sizes=SIZES, block_sizes=SIZES, back_sizes=SIZES,
    weights_sha256="0" * 64,
)  # fmt: skip
FOUND = HfModel(config={"model_type": "new"}, dims=SPEC, weights_sha256="1" * 64)


class Answering:
    """A runner whose process gives this answer, or takes too long if there is none."""

    def __init__(self, answer: dict[str, object] | None) -> None:
        self.answer = answer
        self.asked: list[dict[str, object]] = []

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        self.asked.append(json.loads(argv[-1]))
        if self.answer is None:
            raise CommandTimeoutError("too long")
        return CommandResult((), 0, json.dumps(self.answer), "")

    def start(self, *_: object, **__: object) -> Process:
        raise AssertionError("nothing is to be started")


def run_of_folder(folder: Path, **config: object) -> Run:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors")
    data = {"train": ["d"], "seq_len": 64}
    return Run.model_validate({"steps": 1, "model": {"hf": str(folder)}, "data": data, "batch": {"global": 4}})


def resolved(run: Run, runner: Answering) -> Run:
    return with_hf_folder(run, lambda error: built_by_transformers(run, error, runner))


def test_an_unknown_architecture_is_built_by_transformers_and_said(tmp_path: Path) -> None:
    run = run_of_folder(tmp_path, architectures=["NewForCausalLM"], model_type="new")
    runner = Answering({"hf_model": FOUND.to_json()})
    done = resolved(run, runner)
    assert runner.asked == [
        {"folder": str(tmp_path), "because": "hpctrain has no such family", "seq_len": 64, "seed": run.seed}
    ]
    assert done.spec() == FOUND.spec
    assert "config" not in done.to_json()["model"]["found"]["dims"]
    assert Run.model_validate(done.to_json()).spec() == FOUND.spec
    (line,) = hf_warnings(done)
    for words in ("NewForCausalLM (hpctrain has no such family)", "without tensor and sequence", "needs transformers"):
        assert words in line


def test_settings_that_our_family_lacks_are_the_reason(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
    run = run_of_folder(
        tmp_path, architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=9, hidden_act="relu", **sizes
    )
    runner = Answering({"hf_model": FOUND.to_json()})
    assert resolved(run, runner).spec() == FOUND.spec
    assert str(runner.asked[0]["because"]).startswith('hidden_act: found "relu"')
    with pytest.raises(FileError) as refused:
        resolved(run, Answering({"error": f"{tmp_path / 'config.json'}: it needs one list"}))
    (line,) = str(refused.value).splitlines()
    assert 'hidden_act: found "relu"; allowed: "silu"' in line
    assert line.endswith("; transformers cannot build it either: it needs one list")


def test_one_line_if_neither_can(tmp_path: Path) -> None:
    run = run_of_folder(tmp_path, architectures=["NewForCausalLM"], model_type="new")
    said = r'architectures: found \["NewForCausalLM"\] \(model_type "new"\); transformers cannot build it either: '
    with pytest.raises(InputError, match=f"{said}no such model$"):
        resolved(run, Answering({"error": "no such model"}))
    with pytest.raises(InputError, match=r"transformers gave no model within 600 s$"):
        resolved(run, Answering(None))


def test_tied_weights_are_held_by_both_ends() -> None:
    tied = SPEC.model_copy(
        update={"tied_weights": {"head.weight": "model.embed.weight"}, "back_tensors": {"norm.weight": [8]},
                "back": ["norm", "head"], "front": ["model.embed", "norm0"]}
    )  # fmt: skip
    assert tied.shared_weights([(0, 1), (1, 2)]) == {"model.embed.weight": [0, 1]}
    assert tied.shared_weights([(0, 2)]) == {}
    assert tied.absent_modules(first=False, last=True) == ["norm0"]
    assert tied.absent_modules(first=True, last=False) == ["norm", "head"]
    assert tied.absent_modules(first=False, last=False) == ["model.embed", "norm0", "norm", "head"]
    assert tied.end_parameters(first=False, last=True) == 10 + 72
    assert tied.end_parameters(first=True, last=True) == 20
    assert [name for name, _ in tied.tensors()][1:3] == ["model.layers.0.w", "model.layers.1.w"]
    assert tied.tensor_parallel_error(1) is None
    assert "without tensor parallelism" in str(tied.tensor_parallel_error(2))
