"""The example of docs/own-model.md: planned, trained with a worker killed, and gone on with from its own copy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from forked_python import run_program
from train_site import Gate, Outcome, Site, once_there, small_topology, wait_for, wait_for_step, worker_of

from hpctrain.checkpoint import published
from hpctrain.records.history.run_log import last_row_of_each_step
from hpctrain.records.run.run import read_run

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_model"
SMALL = (
    "model.args={layers: 3, dim: 32, heads: 2, dropout: 0.1}",
    "data.train=[../data]",
    "data.seq_len=64",
    "steps=16",
    "batch.global=8",
    "checkpoint.every=4",
    "validation={every: 16, batches: 1}",
    "parallel={mode: fixed, pp: 2, micro_batch: 2}",
    "recovery.memory=off",
)
SETTINGS = [word for text in SMALL for word in ("--set", text)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(site: Site) -> Outcome:
    """Two stages on two nodes; a worker is killed after the first checkpoint."""
    shutil.copytree(EXAMPLE, site.path / "own_model")
    small_topology(2).write(site.path / "two.json")
    known = set((site.path / "runs").glob("*"))
    gate = Gate(site.path / "gate of own_model", 7)
    words = ("train", "own_model/run.yaml", "--local", "2", "--topology", "two.json", *SETTINGS)
    process = site.start(*words, env=gate.env)
    folder = site.run_folder(known)
    worker = once_there(worker_of, folder, "local1")
    wait_for_step(folder, 5)
    wait_for(lambda: bool(published.listed(folder / "checkpoints")), 60, "the first checkpoint")
    worker.kill()
    gate.open()
    said, _ = process.communicate(timeout=800)
    return Outcome(process.returncode, folder, said)


def test_a_killed_worker_costs_no_step_and_dropout_is_repeated(trained: Outcome) -> None:
    assert trained.code == 0, trained.said
    assert "generation 0 starts from gpt:make on 2 nodes" in trained.said
    assert {row.generation for row in trained.rows} == {0, 1}
    assert [row.step for row in last_row_of_each_step(trained.rows)] == list(range(1, 17))
    assert trained.rows[0].placement is not None
    assert all(0 < (place.base_bytes or 0) < trained.rows[0].memory_bytes_max for place in trained.rows[0].placement)
    assert sorted(place.layers for place in trained.rows[0].placement) in ([[0], [1, 2]], [[0, 1], [2]])
    again = {row.step: row.loss for row in trained.rows if row.generation == 1}
    twice = [row for row in trained.rows if row.generation == 0 and row.step in again]
    assert twice
    assert all(row.loss == pytest.approx(again[row.step], abs=1e-5) for row in twice)
    assert trained.losses()[-1] < trained.losses()[0]


def test_the_run_folder_says_what_was_found_in_the_model(trained: Outcome) -> None:
    assert trained.folder is not None
    measured = read_run(trained.folder / "run.yaml").model.measured
    assert measured is not None
    assert (measured.front, measured.blocks, measured.back) == (["embedding"], "layers", ["norm", "head"])
    assert (measured.layers, measured.dim, measured.vocab) == (3, 32, 257)
    block = 2 * 2 * 32 + 4 * (32 * 32 + 32) + 2 * 4 * 32 * 32 + 5 * 32
    assert measured.block_sizes.parameters == block
    assert measured.parameters() == 3 * block + 257 * 32 + 64 * 32 + 2 * 32 + 257 * 32
    assert measured.tensor_parallel_degrees == [2]


PROGRAM = """
import sys

import torch

from hpctrain import api

run, path = api.load_run(sys.argv[1]), list(sys.path)
model = run.load_checkpoint()
print(sum(parameter.numel() for parameter in model.parameters()), sys.path == path, sys.modules["gpt"].__file__)
print(list(model(torch.zeros(1, 5, dtype=torch.long)).shape))
sys.modules["gpt"].__file__ = "/elsewhere/gpt.py"
try:
    run.load_checkpoint()
except api.InputError as error:
    print(error)
"""


def test_a_program_gets_the_whole_model_by_the_code_of_the_run(trained: Outcome, site: Site) -> None:
    assert trained.folder is not None
    measured = read_run(trained.folder / "run.yaml").model.measured
    assert measured is not None
    done = run_program(PROGRAM, str(trained.folder), cwd=site.path)
    assert done.returncode == 0, done.stderr
    size, shape, refused = done.stdout.splitlines()
    assert size == f"{measured.parameters()} True {trained.folder / 'code' / 'gpt.py'}"
    assert shape == "[1, 5, 257]"
    assert refused.startswith("model.import: this process has imported gpt from /elsewhere/gpt.py")


@pytest.mark.parametrize("file_format", ["hf", "dcp"])
def test_an_export_is_loaded_as_its_readme_says(trained: Outcome, site: Site, tmp_path: Path, file_format: str) -> None:
    assert trained.folder is not None
    words = ("--format", file_format, "--processes", "2", "--max-shard-size", "100KB")
    done = site.command("export", trained.folder.name, "-o", str(tmp_path / "out"), *words)
    assert done.returncode == 0, done.stderr
    assert "gpt:make after step 16" in done.stdout
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".distcp")
    shards = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    tensors = [*shards, "model.safetensors.index.json"] if file_format == "hf" else [".metadata"]
    assert names == sorted(["README.md", *tensors, "tokenizer.json"])
    readme = (tmp_path / "out" / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    shutil.copytree(trained.folder / "code", tmp_path / "out" / "code")
    program += """
import copy
from hpctrain import api
saved = copy.deepcopy(model)
for parameter in saved.parameters():
    parameter.data.zero_()
saved = dict(api.load_run(sys.argv[1]).load_checkpoint(16, model=saved).named_parameters())
print(all(parameter.equal(saved[name]) for name, parameter in model.named_parameters()), len(saved))
"""
    loaded = run_program(program, str(trained.folder), cwd=tmp_path / "out")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == "True 53\n"


def test_it_goes_on_with_the_code_that_was_submitted(trained: Outcome, site: Site) -> None:
    (site.path / "own_model" / "code" / "gpt.py").write_text("raise RuntimeError('edited since')\n")
    resumed = site.train("--resume", trained.folder.name, "--local", "1", "--set", "steps=18")
    shutil.copy(EXAMPLE / "code" / "gpt.py", site.path / "own_model" / "code" / "gpt.py")
    assert resumed.code == 0, resumed.said
    assert [row.step for row in last_row_of_each_step(resumed.rows)] == list(range(1, 19))


def test_it_is_planned_with_its_own_sizes(trained: Outcome, site: Site) -> None:
    argv = ["plan", "own_model/run.yaml", "--topology", "two.json", "-o", "own.json", "--json", *SETTINGS]
    planned = site.command(*argv, "--set", "parallel={mode: fixed, tp: 2}")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["tp"], plan["stages"][-1]["layers"][1]) == (2, 3)
    assert "56.7k parameters on 2 devices" in planned.stderr


def test_a_mistake_in_it_is_one_line(trained: Outcome, site: Site) -> None:
    done = site.command("train", "own_model/run.yaml", "--local", "1", *SETTINGS, "--set", "model.args.heads=5")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "model.blocks: layers.0 cannot be applied" in done.stderr


def test_an_error_of_its_code_is_told_in_its_own_words_everywhere(trained: Outcome, site: Site) -> None:
    """One stage raises, the other one only sees its neighbour go."""
    code = site.path / "own_model" / "code" / "gpt.py"
    raising = """

class Failing(Block):
    def forward(self, x):
        if hasattr(self, "last") and "RANK" in __import__("os").environ:
            raise LookupError("timed out:\\nseventeen widgets")
        return super().forward(x)


def failing(**known):
    model = make(**known)
    for block in model.layers:
        block.__class__ = Failing
    block.last = True
    return model


failing.__signature__ = __import__("inspect").signature(make)
"""
    code.write_text(code.read_text() + raising)
    done = site.train(
        "own_model/run.yaml", "--local", "2", "--topology", "two.json", *SETTINGS, "--set", "model.import=gpt:failing"
    )
    shutil.copy(EXAMPLE / "code" / "gpt.py", code)
    assert done.code == 1
    assert done.folder is not None
    words = re.compile(
        r"LookupError: timed out: seventeen widgets "
        r"\(line \d+ of /\S+/code/gpt.py: raise LookupError\(.*\)\)"
    )
    assert words.search(done.said.splitlines()[-2]), done.said
    failed = [event for event in done.events if event.kind == "failed"]
    assert words.search(failed[0].reason)
    assert [event.kind for event in done.events].count("generation_started") == 1
    status = site.command("status", done.folder.name)
    assert words.search(status.stdout), status.stdout
    log = "".join(path.read_text() for path in done.folder.glob("logs/0/*.0.log"))
    assert "LookupError: timed out:" in log
    assert "seventeen widgets" in log
    assert "/code/gpt.py" in log
