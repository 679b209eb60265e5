"""run.yaml: everything wrong with it is told at once, in the person's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.records.run.optimizer import Optimizer
from hpctrain.records.run.run import Run, read_run

GOOD = """\
steps: 10
model: {preset: tiny-1m}
data: {train: [corpus]}
batch: {global: 4}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(FileError) as caught:
        read_run(path, overrides)
    return [line.removeprefix(str(path)) for line in str(caught.value).splitlines()]


def test_a_short_file_is_a_whole_run(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, GOOD))
    assert (run.steps, run.batch.global_, run.parallel.mode, run.data.seq_len) == (10, 4, "auto", 256)
    assert run.optimizer == Optimizer(lr=1e-4, betas=(0.9, 0.999), warmup_steps=1000)


def test_every_mistake_is_told_at_once_in_file_order(tmp_path: Path) -> None:
    text = """\
nmae: x
steps: many
cluster:
  nodes: 4-3
  time: 1:30:00
model: {preset: tinny}
data:
optimizer:
  lr: -1e-4
  betas: [0.9]
batch: {globl: 3}
recovery:
  retries: on
"""
    assert mistakes(written(tmp_path, text)) == [
        ":1: nmae: unknown key; did you mean 'name'?",
        ":2: steps: found 'many'; input should be a valid integer, unable to parse string as an integer",
        ":4: cluster.nodes: found '4-3'; at least one node, and the second number not below the first",
        ":6: model.preset: found 'tinny'; did you mean 'tiny-1m'?",
        ":7: data: found nothing; keys are expected below it",
        ":9: optimizer.lr: found -0.0001; input should be greater than 0",
        ":10: optimizer.betas[1]: missing; this key must be given",
        ":11: batch.global: missing; this key must be given; allowed: a whole number from 1 to 262144",
        ":11: batch.globl: unknown key; did you mean 'global'?",
        ":13: recovery.retries: found 'on'; input should be a valid integer, unable to parse string as an integer",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("parallel: {mode: auto, pp: 2}", ":5: parallel.pp: not a key of this mode; allowed: mode"),
        ("parallel: {mode: fixed, pipeline: 2}", ":5: parallel.pipeline: unknown key; allowed: dp, micro_batch, mode"),
        ("parallel: {mode: fixed, pp: 0}", ":5: parallel.pp: found 0; input should be greater than or equal to 1"),
        ("parallel: {mode: fixt}", ":5: parallel.mode: found 'fixt'; allowed: 'auto', 'fixed'"),
        (
            "parallel: {pp: 2}",
            ":5: parallel.mode: missing; this key decides which others are allowed; allowed: auto, fixed",
        ),
        ("parallel: fixed", ":5: parallel: found 'fixed'; "),
        (
            "compression: {mode: mixed, groups: [{mode: int4}]}",
            ":5: compression.groups[0].layers: missing; this key must be given; allowed: embedding_head, ",
        ),
        ("compression: {mode: mixed}", ":5: compression.groups: missing; this key must be given; allowed: a list"),
        ("cluster: slurm", ":5: cluster: found 'slurm'; keys are expected below it"),
        ("cluster: {nodes: 0}", ":5: cluster.nodes: found 0; at least one node"),
        ("cluster: {nodes: 3-}", ":5: cluster.nodes: found '3-'; allowed: a number ('4') or a range ('3-4')"),
        ("name: a b", ":5: name: found 'a b'; string should match pattern"),
        ("name: " + "x" * 200, ":5: name: found '" + "x" * 56 + "...; string should match"),
        ("seed: -1", ":5: seed: found -1; input should be greater than or equal to 0"),
        (
            "compression: {mode: topq}",
            ":5: compression.mode: found 'topq'; allowed: 'none', 'bf16', 'int8'",
        ),
        ("compression: {mode: topk, layers: 3}", ":5: compression.layers: found 3; allowed: all, non_attention, non_"),
        ("schema: hpctrain.run/v9", ": schema: found 'hpctrain.run/v9'; this version reads 'hpctrain.run/v1'"),
    ],
)
def test_one_mistake_is_one_line(tmp_path: Path, line: str, expected: str) -> None:
    found = mistakes(written(tmp_path, GOOD + line + "\n"))
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    "model", ["{}", "{preset: tiny-1m, hf: x}", "{preset: tiny-1m, dims: {layers: 1, dim: 8, heads: 1}}"]
)
def test_a_model_is_given_in_exactly_one_way(tmp_path: Path, model: str) -> None:
    text = GOOD.replace("{preset: tiny-1m}", model)
    assert mistakes(written(tmp_path, text)) == [":2: model: give exactly one of preset, dims, hf, import"]


def test_dimensions_that_do_not_fit_are_told(tmp_path: Path) -> None:
    text = GOOD.replace("{preset: tiny-1m}", "{dims: {layers: 2, dim: 10, heads: 3}}")
    assert mistakes(written(tmp_path, text)) == [":2: model.dims: dim 10 is not a multiple of heads 3; give head_dim"]


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_empty_file_is_one_mistake(tmp_path: Path, text: str) -> None:
    assert mistakes(written(tmp_path, text)) == [":1: found no keys; `hpctrain init` writes a commented run file"]


@pytest.mark.parametrize("text", ["- a\n", "text\n", "3\n"])
def test_a_file_without_keys_is_told(tmp_path: Path, text: str) -> None:
    assert mistakes(written(tmp_path, text)) == [":1: found no keys; `hpctrain init` writes a commented run file"]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("steps=7", ("steps",), 7),
        ("optimizer.lr=3e-4", ("optimizer", "lr"), 3e-4),
        ("optimizer.clip_norm=null", ("optimizer", "clip_norm"), None),
        ("cluster.time=1:30:00", ("cluster", "time"), "1:30:00"),
        ("cluster.nodes=3-4", ("cluster", "nodes"), "3-4"),
        ("cluster.nodes=4", ("cluster", "nodes"), "4"),
        ("cluster.time=90", ("cluster", "time"), "90"),
        ("parallel={mode: fixed, pp: 2}", ("parallel", "pp"), 2),
        ("batch.global = 32", ("batch", "global_"), 32),
        ("model.dims.layers=2", ("model", "dims", "layers"), 2),
    ],
)
def test_an_override_is_typed_like_the_file(tmp_path: Path, override: str, key: tuple[str, ...], value: Any) -> None:
    dims = GOOD.replace("{preset: tiny-1m}", "{dims: {layers: 4, dim: 8, heads: 2}}")
    found: Any = read_run(written(tmp_path, dims), (override,))
    for part in key:
        found = getattr(found, part)
    assert found == value


def test_later_overrides_win(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, GOOD), ("steps=1", "steps=2")).steps == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: write it as key.path=value"),
        ("=3", "--set =3: write it as key.path=value"),
        ("a..b=3", "--set a..b=3: write it as key.path=value"),
        ("steps.x=3", "--set steps.x=3: 'steps' holds 10, which has no keys below it"),
        ("data.train.0=x", "--set data.train.0=x: 'train' holds"),
        ("name=[a", "--set name=[a: the value is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_put_in_place_is_told(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_run(written(tmp_path, GOOD), (override,))
    assert str(caught.value).startswith(message)


def test_a_mistake_in_an_override_points_at_no_line_of_the_file(tmp_path: Path) -> None:
    found = mistakes(written(tmp_path, GOOD), "steps=x", "batch={glob: 1}", "optimizer.lrr=1")
    assert found == [
        ": steps: found 'x'; input should be a valid integer, unable to parse string as an integer (given by --set)",
        ": batch.global: missing; this key must be given; allowed: a whole number from 1 to 262144 (given by --set)",
        ": batch.glob: unknown key; did you mean 'global'? (given by --set)",
        ": optimizer.lrr: unknown key; did you mean 'lr'? (given by --set)",
    ]


def test_weighted_and_named_data_start_there_too(tmp_path: Path) -> None:
    text = GOOD.replace("[corpus]", "[{path: a, weight: 2}, {path: /b, weight: 0.5}], valid: {web: v, code: /c}")
    data = read_run(written(tmp_path, text)).data
    assert (data.train_folders, data.weights) == ([str(tmp_path / "a"), "/b"], [2.0, 0.5])
    assert data.valid == {"web": str(tmp_path / "v"), "code": "/c"}
    assert data.valid_folders == [str(tmp_path / "v"), "/c"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("[{path: a, weight: 0}]", "data.train[0].weight: found 0; input should be greater than 0"),
        ("[{path: a, wieght: 1}]", "data.train[0].wieght: unknown key; did you mean 'weight'?"),
        ("[a, 3]", "data.train[1]: found 3; input should be a valid string"),
        ("[a, {path: b, weight: 1}]", "train: a has no weight and others have; give every folder one, or none"),
        ("[{path: a, weight: 1}, {path: a, weight: 2}]", "train: a is there twice; add its weights up"),
        ("[a], valid: {no good: v}", "string should match pattern"),
        ("[a], valid: 3", "data.valid: found 3; input should be a valid list"),
    ],
)
def test_mistakes_in_the_data_are_told(tmp_path: Path, data: str, said: str) -> None:
    assert said in " ".join(mistakes(written(tmp_path, GOOD.replace("[corpus]", data))))


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("{mode: maskd}", "objective.mode: found 'maskd'; allowed: 'next_token', 'masked', 'span_corruption'"),
        ("{mode: masked, mean_span: 3}", "objective.mean_span: not a key of this mode"),
        ("{mode: masked, mask_fraction: 0.95}", "more than the whole; lower one of them"),
        ("{mode: span_corruption, fraction: 0.6}", "objective.fraction: found 0.6; input should be less than or equal"),
    ],
)
def test_mistakes_in_the_objective_are_told(tmp_path: Path, objective: str, said: str) -> None:
    assert said in " ".join(mistakes(written(tmp_path, f"{GOOD}objective: {objective}\n")))


def test_relative_data_start_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = GOOD.replace("[corpus]", "[corpus, /abs, ~/mine], valid: [v], tokenizer: t.json")
    (tmp_path / "sub").mkdir()
    data = read_run(written(tmp_path / "sub", text)).data
    assert data.train == [str(tmp_path / "sub" / "corpus"), "/abs", "/home/me/mine"]
    assert data.valid == [str(tmp_path / "sub" / "v")]
    assert data.tokenizer == str(tmp_path / "sub" / "t.json")


@pytest.mark.parametrize(
    ("warmup_steps", "steps", "expected"),
    [(1000, 20_000, 1000), (1000, 200, 20), (1000, 5, 1), (0, 100, 0), (3, 100, 3)],
)
def test_a_short_run_warms_up_for_a_tenth(warmup_steps: int, steps: int, expected: int) -> None:
    assert Optimizer(warmup_steps=warmup_steps).warmup(steps) == expected


@pytest.mark.parametrize(
    ("runtime", "image", "expected"),
    [("auto", "a.sif", "{base}/a.sif"), ("pyxis", "nvidia+pytorch:25.01", "nvidia+pytorch:25.01"),
     ("pyxis", "../a.sqsh", "{base}/../a.sqsh")],
)  # fmt: skip
def test_paths_of_an_image_start_at_the_run_file(tmp_path: Path, runtime: str, image: str, expected: str) -> None:
    lines = f"container: {{image: {image!r}, runtime: {runtime}, binds: ['own:/own:ro', /scratch]}}\n"
    container = read_run(written(tmp_path, GOOD + lines)).container
    assert container is not None
    assert container.image == expected.format(base=tmp_path)
    assert container.binds == [f"{tmp_path}/own:/own:ro", "/scratch"]


def test_models_of_other_forms_are_understood_and_declined(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, GOOD.replace("preset: tiny-1m", "hf: folder")))
    with pytest.raises(InputError, match=r"model\.hf"):
        run.spec()


def test_a_model_of_one_s_own_has_dimensions_when_it_was_measured(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, GOOD.replace("preset: tiny-1m", "import: my.models:make")))
    with pytest.raises(InputError, match=r"model\.import: the model was not measured yet"):
        run.spec()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("import: my.models.make", "found 'my.models.make'; write it as package.module:factory"),
        ("import: a:b, tensor_parallel: {up: diagonal}", "input should be 'columns' or 'rows'"),
        ("preset: tiny-1m, args: {layers: 3}", "args goes with import; found it with preset"),
        ("import: a:b, front: []", "found []"),
    ],
)
def test_mistakes_in_a_model_of_one_s_own_are_told(tmp_path: Path, model: str, said: str) -> None:
    found = mistakes(written(tmp_path, GOOD.replace("preset: tiny-1m", model)))
    assert len(found) == 1
    assert said in found[0]


def test_a_job_that_keeps_its_id_has_no_successors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "recovery: {requeue: same_job, successors: 2}\n")
    with pytest.raises(FileError, match="successors is 2, and requeue is same_job: use requeue: new_job"):
        read_run(path)


@pytest.mark.parametrize(
    ("recovery", "message"),
    [
        ("memory: off, snapshot_every: 2", "snapshot_every is 2, and memory is off: use memory: auto"),
        (
            "memory: snapshots",
            "snapshot_every is off, and memory is snapshots: set snapshot_every, or use memory: auto",
        ),
    ],
)
def test_snapshots_and_the_memory_for_them_are_asked_for_together(tmp_path: Path, recovery: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + f"recovery: {{{recovery}}}\n")
    with pytest.raises(FileError, match=message):
        read_run(path)


def test_reading_is_a_pure_function_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert read_run(path).sha256() == read_run(path).sha256()
    assert read_run(path, ("seed=1",)).sha256() != read_run(path).sha256()
    assert isinstance(read_run(path), Run)
