"""The recipes of docs/after-training.md, run as they are written."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from real_text import TEXT
from train_site import CPU_ONLY, RUN, Site

pytestmark = [pytest.mark.slow, pytest.mark.requires("after_training", "transformers")]

TEXTS = ["A run folder belongs to one user.", "The planner chooses stages.\n  Zürich has 3 workers."]
COMPARE = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

texts = json.load(open("texts.json"))
tokenizers = AutoTokenizer.from_pretrained("model"), AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
models = (
    AutoModelForCausalLM.from_pretrained("model").eval(),
    AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf").eval(),
)
with torch.no_grad():
    for text in texts:
        ids = [tokenizer(text).input_ids for tokenizer in tokenizers]
        first, second = (model(torch.tensor([ids[0]])).logits for model in models)
        print(json.dumps([ids[0] == ids[1], len(ids[0]), (first - second).abs().max().item()]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Path:
    """A folder with an exported decoder, `model`, whose tokenizer hpctrain trained."""
    path = tmp_path_factory.mktemp("recipes")
    own = Site(path)
    dims = {"family": "decoder", "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64}
    settings = {"model": {"dims": dims}, "steps": 4, "batch": {"global": 4}, "checkpoint": {"every": 4}}
    run = {key: value for key, value in RUN.items() if key != "validation"} | settings
    (path / "run.yaml").write_text(yaml.safe_dump(run))
    done = own.command("data", "prepare", str(TEXT), "-o", "data", "--tokenizer", "train:600")
    assert done.returncode == 0, done.stderr
    trained = own.train("run.yaml", "--local", "1", "--topology", str(site.path / "one.json"))
    assert trained.code == 0, trained.said
    done = own.command("export", str(trained.folder), "-o", "model")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def page(repository: Path) -> list[str]:
    """The blocks of code on the page."""
    text = (repository / "docs" / "after-training.md").read_text()
    return [textwrap.dedent(block).strip() for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)]


def called(line: str, programs: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the page, whose first word is a program of the environment."""
    program, *words = shlex.split(line)
    home = str(folder / "hf_home")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": home}
    return subprocess.run(
        [str(programs / program), *words], cwd=folder, env={**os.environ, **CPU_ONLY, **offline}, capture_output=True,
        text=True, timeout=800, check=False,
    )  # fmt: skip


def line_of(page: list[str], words: str) -> str:
    """The only line on the page with the words."""
    (line,) = [line for block in page for line in block.splitlines() if words in line]
    return line


def bits_per_byte(folder: Path) -> float:
    """transformers' loss of the texts, with the end-of-text token before the first token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    loss = 0.0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0]
        loss += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return loss / sum(len(text.encode()) for text in TEXTS) / math.log(2)


def test_the_harness_computes_the_loss_of_the_model(folder: Path, page: list[str], after_training: Path) -> None:
    (task,) = [block for block in page if block.startswith("# tasks/held_out.yaml")]
    (folder / "tasks").mkdir()
    (folder / "tasks" / "held_out.yaml").write_text(task)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "tasks" / "held_out.jsonl").write_text("\n".join(lines))
    done = called(line_of(page, "--tasks held_out"), after_training, folder)
    assert done.returncode == 0, done.stderr
    (value,) = re.findall(r"\|bits_per_byte\|[^|]*\|\s*([\d.]+)\|", done.stdout)
    assert float(value) == pytest.approx(bits_per_byte(folder), abs=1e-4)


def test_a_gguf_file_has_the_tokens_and_the_logits_of_the_model(
    folder: Path, page: list[str], after_training: Path
) -> None:
    program = line_of(page, "python convert_hf_to_gguf.py").replace(
        "python convert_hf_to_gguf.py", "convert-hf-to-gguf"
    )
    refused = called(program, after_training, folder)
    assert refused.returncode != 0
    assert "BPE pre-tokenizer was not recognized" in refused.stderr
    (script,) = [block for block in page if block.startswith("# convert_own_tokenizer.py")]
    (folder / "convert_own_tokenizer.py").write_text(script)
    done = called(line_of(page, "python convert_own_tokenizer.py"), after_training, folder)
    assert done.returncode == 0, done.stderr
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    (folder / "compare.py").write_text(COMPARE)
    done = called("python compare.py", after_training, folder)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        same, tokens, difference = json.loads(line)
        assert same
        assert tokens > 5
        assert difference <= 1e-5
    assert len(done.stdout.splitlines()) == len(TEXTS)
