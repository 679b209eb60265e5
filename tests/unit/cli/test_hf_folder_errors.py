"""What the command line says of a Hugging Face folder that no run can start from: a line for each mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from hpctrain.base.errors import EXIT_USAGE
from hpctrain.cli.main import cli
from hpctrain.corpus.read.objective import SpecialTokens
from hpctrain.hf.config import architecture_for, config_of
from hpctrain.hf.tensors import assign_to_shards, index_of
from hpctrain.records.model.decoder_spec import DecoderSpec

SPEC = DecoderSpec(layers=2, dim=32, heads=4, vocab=300)
CONFIG = config_of(SPEC, 32, SpecialTokens(300, 300, 256))
RUN = {"steps": 2, "model": {"hf": "model"}, "data": {"train": ["data"], "seq_len": 32}, "batch": {"global": 4}}
LAST = "model-00002-of-00002.safetensors"
TOPOLOGY = Path(__file__).parents[3] / "topology" / "laptop-4-nodes.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("All happy families are alike. " * 200)
    made = CliRunner().invoke(cli, ["data", "prepare", str(folder / "text.txt"), "-o", str(folder / "data")])
    assert made.exit_code == 0, made.output
    return folder / "data"


@pytest.fixture(autouse=True)
def transformers_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started to ask transformers."""
    reply = (2, {"error": "it is refused there, too"})
    monkeypatch.setattr("hpctrain.launch.preflight.prepare.worker_reply", lambda *_, **__: reply)


@pytest.fixture
def model(runs: Path, data: Path) -> Path:
    """A folder that a run could start from, named in run.yaml of the current folder."""
    Path("data").symlink_to(data)
    Path("run.yaml").write_text(json.dumps(RUN))
    folder = runs.parent / "model"
    folder.mkdir()
    shards = assign_to_shards(architecture_for(SPEC).tensors(SPEC), 4, 100_000)
    for name, tensors in shards.items():
        save_file({tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(shards, 0)))
    write_config(folder)
    return folder


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def with_tensor(folder: Path, name: str, tensor: np.ndarray | None) -> None:
    """Put a tensor into the last file, or take it away."""
    held = {key: value for key, value in load_file(folder / LAST).items() if key != name}
    save_file(held if tensor is None else {**held, name: tensor}, folder / LAST)


def with_tokenizer(folder: Path) -> None:
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def pickled(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()


def lines_of(result: Result) -> list[str]:
    """The lines of the error with which a command ended."""
    assert getattr(result.exception, "exit_code", None) == EXIT_USAGE, result.exception
    return str(result.exception).splitlines()


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: folder.rename("elsewhere"), "model.hf: {}: no such folder; name one with config.json"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "model.hf: {}: has no config.json; name one with config.json and safetensors files in it",
    ),
    "file missing": (
        lambda folder: (folder / LAST).unlink(),
        f"{{}}/model.safetensors.index.json: weight_map: 1 of 2 files are not there, such as {LAST}; copy the folder "
        "again",
    ),
    "file cut": (
        lambda folder: (folder / LAST).write_bytes((folder / LAST).read_bytes()[:-4]),
        f"{{}}/{LAST}: has ",
    ),
    "file not fetched": (
        lambda folder: (folder / LAST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        f"{{}}/{LAST}: found a pointer of Git LFS, not the weights; run `git lfs pull`",
    ),
    "index missing": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        "model.hf: {}: has no model.safetensors and no model.safetensors.index.json (found model-00001-of-00002."
        "safetensors); copy the folder again, or write it with save_pretrained of transformers",
    ),
    "pickled": (
        pickled,
        "model.hf: {}: has no model.safetensors and no model.safetensors.index.json (found pytorch_model.bin, a "
        "pickle, which is never opened); copy the folder again, or write it with save_pretrained of transformers",
    ),
    "tensor missing": (
        lambda folder: with_tensor(folder, "lm_head.weight", None),
        "{}: lm_head.weight: no such tensor; config.json says it has shape [300, 32]; take config.json and weights "
        "from one save_pretrained",
    ),
    "tensor of another shape": (
        lambda folder: with_tensor(folder, "lm_head.weight", np.zeros((3, 5), np.float32)),
        "{}: lm_head.weight: found shape [3, 5]; config.json says [300, 32]; take config.json and weights from one "
        "save_pretrained",
    ),
    "tensor of integers": (
        lambda folder: with_tensor(folder, "lm_head.weight", np.zeros((300, 32), np.int8)),
        "{}: lm_head.weight: found numbers of type I8; allowed: F32, F16, BF16, F64; save the model in one of them",
    ),
    "tensor of another model": (
        lambda folder: with_tensor(folder, "score.weight", np.zeros(3, np.float32)),
        "{}: score.weight: no part of a ",
    ),
    "quantized": (
        lambda folder: write_config(folder, quantization_config={"quant_method": "gptq"}),
        '{}/config.json: quantization_config: found {{"quant_method": "gptq"}}; allowed: null',
    ),
    "rope type": (
        lambda folder: write_config(folder, rope_scaling={"rope_type": "banana", "factor": 2.0}),
        '{}/config.json: rope_scaling: found {{"rope_type": "banana", "factor": 2.0}}; allowed: ',
    ),
    "rope without a mapping": (
        lambda folder: write_config(folder, rope_scaling="linear"),
        '{}/config.json: rope_scaling: found "linear"; allowed: ',
    ),
    "size": (
        lambda folder: write_config(folder, num_hidden_layers=-2),
        "{}/config.json: num_hidden_layers: found -2; allowed: a whole number above 0",
    ),
    "architecture": (
        lambda folder: write_config(folder, architectures=["MambaForCausalLM"], model_type="mamba"),
        '{}/config.json: architectures: found ["MambaForCausalLM"] (model_type "mamba"); ',
    ),
    "tokenizer": (
        with_tokenizer,
        "model.hf: {}: the data was made with another tokenizer (bytes, vocabulary 257): its token 0 is 'Ā', the "
        "model's 'w0'; prepare it again with --tokenizer {}/tokenizer.json",
    ),
    "vocabulary": (
        lambda folder: write_config(folder, vocab_size=200),
        "{}: model.embed_tokens.weight: found shape [300, 32]; config.json says [200, 32]; ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_line_with_file_field_and_next_step(
    mistake: str, model: Path, hpctrain: Callable[..., Result]
) -> None:
    make, said = MISTAKES[mistake]
    make(model)
    first, *others = lines_of(hpctrain("train", "run.yaml", "--local", "1", "--dry-run"))
    assert first.startswith(said.format(model, model))
    assert all("lm_head.weight" in line for line in others), "of one mistake, only a second tensor is told besides"
    assert not Path("runs").exists()


def test_every_command_says_the_same(model: Path, fake: object, hpctrain: Callable[..., Result]) -> None:
    (model / LAST).unlink()
    said = [
        lines_of(hpctrain(*words))
        for words in (
            ("train", "run.yaml", "--local", "1", "--dry-run"),
            ("submit", "run.yaml", "--dry-run", "--set", "cluster.kind=slurm"),
            ("plan", "run.yaml", "--topology", str(TOPOLOGY)),
        )
    ]
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 1


def test_several_mistakes_are_a_line_each(model: Path, hpctrain: Callable[..., Result]) -> None:
    write_config(model, hidden_act="relu6", intermediate_size=0, tie_word_embeddings="yes")
    said = lines_of(hpctrain("train", "run.yaml", "--local", "1", "--dry-run"))
    fields = ["hidden_act", "intermediate_size", "tie_word_embeddings"]
    assert sorted(line.split(": ")[1] for line in said) == fields
    write_config(model, num_hidden_layers=9)
    said = lines_of(hpctrain("train", "run.yaml", "--local", "1", "--dry-run"))
    assert len(said) == 9
    assert said[-1] == f"{model}: and 55 more tensors like these"


def test_a_padding_token_that_the_data_lacks_is_refused(
    runs: Path, data: Path, hpctrain: Callable[..., Result]
) -> None:
    dims = {"layers": 2, "dim": 32, "heads": 4, "padding_id": 300}
    Path("run.yaml").write_text(
        json.dumps({**RUN, "model": {"dims": dims}, "data": {"train": [str(data)], "seq_len": 32}})
    )
    said = lines_of(hpctrain("train", "run.yaml", "--local", "1", "--dry-run"))
    assert said == ["model.dims: padding_id 300 is no token: the vocabulary has 257 (counted in the data)"]
