"""A run from a folder of transformers, and back: the same loss on the same batch at both ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from train_site import Outcome, Site, small_topology, wait_for

from hpctrain.corpus.read.tokens import Corpus
from hpctrain.records.run.run import read_run

pytestmark = [pytest.mark.slow, pytest.mark.requires("transformers")]

SETTINGS = (
    "steps=3", "checkpoint.every=2", "validation={every: 3, batches: 0}", "batch.global=4",
    "parallel={mode: fixed, pp: 2, micro_batch: 2}", "optimizer={lr: 0.01, warmup_steps: 0}",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(site: Site) -> Outcome:
    """Three steps from a GPT-2 of transformers, in two stages."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=7,
        resid_pdrop=0.1,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(site.path / "gpt2")
    (site.path / "gpt2" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (site.path / "gpt2" / "generation_config.json").write_text('{"eos_token_id": [7, 256], "temperature": 0.6}')
    (site.path / "gpt2" / "tokenizer_config.json").write_text('{"padding_side": "left", "pad_token": "<|endoftext|>"}')
    small_topology(2).write(site.path / "two.json")
    words = [word for text in ("model={hf: gpt2}", *SETTINGS) for word in ("--set", text)]
    return site.train("run.yaml", "--local", "2", "--topology", "two.json", *words)


@pytest.fixture(scope="module")
def built_by_transformers(site: Site) -> Outcome:
    """Three steps from a StableLM, which is none of our families, in two stages."""
    import transformers

    torch.manual_seed(0)
    config = transformers.StableLmConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=7,
    )  # fmt: skip
    transformers.StableLmForCausalLM(config).save_pretrained(site.path / "stablelm")
    small_topology(2).write(site.path / "two.json")
    words = [word for text in ("model={hf: stablelm}", *SETTINGS) for word in ("--set", text)]
    return site.train("run.yaml", "--local", "2", "--topology", "two.json", *words)


def loss_of(folder: Path, rows: np.ndarray) -> float:
    """transformers' own loss of a batch [n, seq + 1]."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.from_numpy(rows)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


STOP_AT_THE_THIRD_TENSOR = """
import os, pathlib, sys, time

if "hpctrain.worker" in sys.orig_argv:
    real, synced = os.fsync, []

    def fsync(descriptor):
        real(descriptor)
        synced.append(descriptor)
        if len(synced) == 3:
            pathlib.Path(os.environ["STOPPED"]).touch()
            time.sleep(600)

    os.fsync = fsync
"""
"""Code that Python runs at its start (sitecustomize): a worker stops when it has written three files."""


def kill_dcp_export(site: Site, run: str, output: Path, temporary: Path) -> None:
    """An export that is killed leaves nothing under its name."""
    (temporary / "site").mkdir()
    (temporary / "site" / "sitecustomize.py").write_text(STOP_AT_THE_THIRD_TENSOR)
    stopped = temporary / "stopped"
    path = os.pathsep.join([str(temporary / "site"), os.environ.get("PYTHONPATH", "")])
    process = site.start(
        "export", run, "-o", str(output), "--format", "dcp", env={"PYTHONPATH": path, "STOPPED": str(stopped)}
    )
    try:
        wait_for(stopped.exists, 120, "three tensors")
    finally:
        process.kill()
        process.communicate()
    assert not output.exists()
    (leftover,) = output.parent.glob(f".{output.name}.*.tmp")
    assert len(list(leftover.glob("*.distcp"))) >= 3


def test_an_export_for_torch_is_whole_and_has_every_bit(trained: Outcome, site: Site, tmp_path: Path) -> None:
    """The export of step 2 as DCP, by two processes: torch loads it into transformers' model, and it becomes the same
    folder again."""
    import transformers

    assert trained.folder is not None, trained.said
    run, out, back, folder = trained.folder.name, tmp_path / "dcp", tmp_path / "back", tmp_path / "hf"
    kill_dcp_export(site, run, out, tmp_path)
    for words in (
        ("export", run, "-o", str(out), "--step", "2", "--format", "dcp", "--processes", "2"),
        ("convert", str(out), "-o", str(back)),
        ("export", run, "-o", str(folder), "--step", "2"),
    ):
        done = site.command(*words)
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob(".dcp.*"))
    expected, again = (load_file(made / "model.safetensors") for made in (folder, back))
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(out)).eval()
    state = model.state_dict()
    names = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    dcp.load({name: state[name] for name in names}, checkpoint_id=out, no_dist=True)
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        assert (model(tokens).logits - logits).abs().max() <= 1e-5
    # Tokenizer and generation keep the settings of the folder that the run began with.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("left", 256, 256)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.temperature) == ([7, 256], 0.6)
    refused = site.command("export", run, "-o", str(out), "--format", "dcp")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "holds .metadata; name a new folder, or replace the model in it with --force" in refused.stderr


def test_the_loss_is_that_of_transformers_before_and_after(trained: Outcome, site: Site, tmp_path: Path) -> None:
    import transformers

    assert trained.code == 0, trained.said
    assert trained.folder is not None
    assert f"generation 0 starts from the folder {site.path / 'gpt2'} on 2 nodes" in trained.said
    assert (
        "would train this model with resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1; models here have no dropout"
        in trained.said
    )
    corpus = Corpus.open([str(site.path / "data")], "train", 64)
    rows = [corpus.rows(3, 4 * step, 4) for step in range(3)]
    assert trained.losses()[0] == pytest.approx(loss_of(site.path / "gpt2", rows[0]), abs=1e-5)
    # Nothing in the run folder needs the folder any more.
    (site.path / "gpt2").rename(tmp_path / "gone")
    run = trained.folder.name
    done = site.command("export", run, "-o", "out", "--step", "2", "--max-shard-size", "60KB", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "gpt2: no such folder; the export lacks its chat template" in done.stderr
    assert (told["step"], told["architecture"]) == (2, "GPT2LMHeadModel")
    assert "model.safetensors.index.json" in told["files"]
    assert trained.losses()[2] == pytest.approx(loss_of(site.path / "out", rows[2]), abs=1e-5)
    config = json.loads((site.path / "out" / "config.json").read_text())
    assert (config["resid_pdrop"], config["eos_token_id"]) == (0.1, 256)
    tokenizer = transformers.AutoTokenizer.from_pretrained(site.path / "out")
    text = "def café():\n\treturn 'x'  # …"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    # Data, model and tokenizer agree on one end of text; the folder that the run began with had another.
    generation = json.loads((site.path / "out" / "generation_config.json").read_text())
    assert {tokenizer.eos_token_id, generation["eos_token_id"], config["eos_token_id"]} == {256}
    assert tokenizer("text" + tokenizer.eos_token)["input_ids"] == [*b"text", 256]
    twice = site.command("export", run, "-o", "out")
    assert twice.returncode == 2
    assert "--force" in twice.stderr
    half = site.command("export", run, "-o", "out", "--force", "--dtype", "bfloat16")
    assert half.returncode == 0, half.stderr
    assert sorted(path.name for path in site.path.glob("out*")) == ["out"]
    assert not list(site.path.glob(".out*"))
    assert trained.losses()[2] == pytest.approx(loss_of(site.path / "out", rows[2]), abs=0.5)
    assert read_run(trained.folder / "run.yaml").model.hf == str(site.path / "gpt2")
    again = site.command("train", "run.yaml", "--local", "1", "--dry-run", "--set", "model={hf: out}")
    assert again.returncode == 0, again.stderr
    # As a start for other data, the folder is held against that data's tokens.
    vocabulary = {f"w{number}": number for number in range(300)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words.save(str(site.path / "out" / "tokenizer.json"))
    done = site.command("train", "run.yaml", "--local", "1", "--dry-run", "--set", "model={hf: out}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "another tokenizer (bytes, vocabulary 257)" in done.stderr
    assert f"--tokenizer {site.path / 'out' / 'tokenizer.json'}" in done.stderr


def test_a_model_that_transformers_builds_is_trained_and_exported(built_by_transformers: Outcome, site: Site) -> None:
    done = built_by_transformers
    assert done.code == 0, done.said
    assert done.folder is not None
    words = "transformers builds this model, a StableLmForCausalLM (hpctrain has no such family): without tensor"
    assert words in done.said
    assert {tuple(place.layers) for place in done.rows[0].placement or []} in ({(0,), (1, 2)}, {(0, 1), (2,)})
    corpus = Corpus.open([str(site.path / "data")], "train", 64)
    rows = [corpus.rows(3, 4 * step, 4) for step in range(3)]
    assert done.losses()[0] == pytest.approx(loss_of(site.path / "stablelm", rows[0]), abs=1e-5)
    exported = site.command("export", done.folder.name, "-o", "stablelm-out", "--step", "2")
    assert exported.returncode == 0, exported.stderr
    assert done.losses()[2] == pytest.approx(loss_of(site.path / "stablelm-out", rows[2]), abs=1e-5)
    names = ("stablelm", "stablelm-out")
    before, after = (json.loads((site.path / name / "config.json").read_text()) for name in names)
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert differing <= {"eos_token_id", "dtype", "torch_dtype", "transformers_version"}
