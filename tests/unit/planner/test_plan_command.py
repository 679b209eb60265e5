"""`hpctrain plan` at the command line: files, machine form, explanation, errors with their exit codes."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner
from steps_made import truth, write_generation

from hpctrain.base.errors import HpctrainError
from hpctrain.cli.commands.plan import plan_command as command
from hpctrain.planner import make_plan
from hpctrain.records.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("short_annealing")

RUN = {
    "steps": 10,
    "model": {"dims": {"layers": 6, "dim": 128, "heads": 4, "vocab": 512}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 16},
}


@pytest.fixture
def call(tmp_path, topology):
    """call(arguments…) -> (exit code, stdout, stderr), as the command line would end."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    topology((1.0, 1.0, 0.5)).write(tmp_path / "topology.json")

    def run(*arguments, run_file="run.yaml", topology_file="topology.json"):
        given = [
            str(tmp_path / run_file),
            "--topology",
            str(tmp_path / topology_file),
            "-o",
            str(tmp_path / "plan.json"),
        ]
        result = CliRunner().invoke(command, [*given, *arguments])
        if isinstance(result.exception, HpctrainError):
            return result.exception.exit_code, result.stdout, str(result.exception)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    run.folder = tmp_path
    return run


def test_a_plan_is_written_and_summed_up(call):
    code, out, _ = call()
    assert code == 0
    made = Plan.read(call.folder / "plan.json")
    assert f"pp {made.pp} × dp {made.dp} × tp {made.tp}" in out
    assert "predicted step time" in out


GROUP = "{mode: int4, layers: attention}"


@pytest.mark.parametrize(
    ("groups", "mistake"),
    [
        ("3", ": found 3; input should be a valid list"),
        (GROUP, ": found {'mode': 'int4', 'layers': 'attention'}; input should be a valid list"),
        ("[]", ": found none; allowed: a codec for at least one of embedding_head, attention, feed_forward"),
        ("", ": found nothing; input should be a valid list"),
        ("[int4]", "[0]: found 'int4'; keys are expected below it"),
        (f"[{GROUP}, {GROUP}]", ": found 2 codecs for attention; allowed: one for each layer group"),
        (f"[{GROUP}, {{layers: feed_forward}}]", "[1].mode: missing; "),
        ("[{mode: int4}]", "[0].layers: missing; "),
        ("[{mode: int5, layers: attention}]", "[0].mode: found 'int5'; input should be 'bf16', 'int8', 'int4', 'rot"),
        ("[{mode: topk, layers: attention}]", "[0].mode: found 'topk'; input should be 'bf16', 'int8', 'int4', 'rot"),
        ("[{mode: int4, layers: attn}]", "[0].layers: found 'attn'; input should be 'embedding_head', 'attention' or"),
        ("[{mode: int4, layers: all}]", "[0].layers: found 'all'; input should be 'embedding_head', 'attention' or"),
        ("[{mode: int4, layers: attention, seed: 3}]", "[0].seed: found 3; mode int4 has no seed"),
        *(
            (f"[{{mode: int4, layers: attention, {key}: bf16}}]", f"[0].{key}: unknown key; allowed: layers, mode, ")
            for key in ("activations", "intra_node", "tensor_parallel")
        ),
    ],
)
def test_a_mistake_in_the_codecs_of_layer_groups_is_one_line(call, groups, mistake):
    code, _, error = call("--set", f"compression={{mode: mixed, groups: {groups}}}")
    assert code == 2
    (line,) = error.splitlines()
    assert line.removeprefix(f"{call.folder}/run.yaml: compression.groups").startswith(mistake)


def test_a_plan_that_was_edited_is_not_written_over(call):
    one = ("--nodelist", "local0")
    call(*one)
    path = call.folder / "plan.json"
    assert call(*one, "--set", "batch.global=32")[0] == 0, "its own plan is replaced"
    made = json.loads(path.read_text())
    path.write_text(json.dumps(made, indent=4, sort_keys=True))
    assert call(*one)[0] == 0, "white space and the order of keys are no edit"
    for text in (json.dumps({**made, "notes": ["mine"]}), json.dumps({**made, "made_sha256": None}), "my notes", ""):
        path.write_text(text)
        code, out, err = call(*one)
        assert (code, out, path.read_text()) == (2, "", text)
        assert "plan.json: found a file that was edited" in err
        assert "\n" not in err
    assert call(*one, "--force")[0] == 0
    assert not Plan.read(path).is_edited


def test_what_saves_memory_is_summed_up(call):
    _, out, _ = call("--set", "parallel={mode: fixed, dp: 2, zero: 3, recompute: full}")
    assert "zero 3 over 2 replicas, recompute full" in out
    assert "zero" not in call()[1]


def test_json_is_all_there_is_on_stdout(call):
    code, out, err = call("--json", "--explain")
    assert code == 0
    assert Plan.from_json(json.loads(out)) == Plan.read(call.folder / "plan.json")
    assert "Plans that were not chosen" in err


def test_the_explanation_says_what_where_and_why(call):
    _, out, _ = call("--explain")
    said = ("What goes where", "local[0-1]:cpu0", "compute", "Lower bound", "Memory", "heads 4 is not a multiple")
    assert [text for text in said if text not in out] == []


def test_overrides_and_nodes_and_solver(call):
    call("--set", "batch.global=8", "--nodelist", "local[0-1]", "--solver", "paper")
    made = Plan.read(call.folder / "plan.json")
    assert (made.sequences, made.solver) == (8, "paper")
    assert set(made.nodes) == {"local0", "local1"}


def test_energy_takes_the_power_that_was_measured_and_given_power_instead_of_it(call):
    path = call.folder / "topology.json"
    value = json.loads(path.read_text())
    for node, watts in zip(value["nodes"], (20.0, 20.0, 900.0), strict=True):
        node["devices"][0]["power_w"] = watts
    path.write_text(json.dumps(value))
    assert call("--objective", "energy")[0] == 0
    assert "local2" not in Plan.read(call.folder / "plan.json").nodes
    assert call("--objective", "energy", "--power", "type1.0=900", "--power", "type0.5=1")[0] == 0
    assert Plan.read(call.folder / "plan.json").nodes == ["local2"]


@pytest.mark.slow
def test_objective_constraints_and_their_reasons(call):
    code, out, _ = call("--objective", "robust", "--forbid", "local2", "--max-memory", "50", "--explain")
    assert code == 0
    assert "local2" not in Plan.read(call.folder / "plan.json").nodes
    said = ("Chosen by robust", "Critical path", "Memory of a device (50 % may be used", "without local1")
    assert [text for text in said if text not in out] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--objective", "energy"], 2, "give --power type"),
        (["--objective", "cost", "--price", "a"], 2, "write it like name=0.5"),
        (["--forbid", "local9"], 2, "--forbid: found local9"),
        (["--forbid", "local[0-2]"], 4, "no node of the topology is left"),
        (["--min-goodput", "0.9"], 2, "--min-goodput and --node-mtbf go together"),
        (["--solver", "paper", "--objective", "robust"], 2, "it plans for time only"),
        (["--set", "bathc.global=8"], 2, "bathc: unknown key; did you mean 'batch'?"),
        (["--set", "model.dims.dim=8192", "--set", "model.dims.layers=48"], 4, "cannot fit"),
        (["--nodelist", "node[7-8]"], 4, "it has no figures of node[7-8]; probe these nodes"),
        (["--nodelist", "a[["], 2, "--nodelist a[["),
        (["--nodelist", ""], 2, "--nodelist: found no node"),
        (["--forbid", ""], 2, "--forbid: found no node"),
        (["-o", ""], 2, "-o: found no name of a file"),
        (["--set", "parallel={mode: fixed, pp: 4}", "--set", "recovery.spares=1"], 4, "Kept idle as spares: local2."),
        (["--set", "parallel={mode: fixed, tp: 3}"], 2, "heads 4 is not a multiple of tp 3"),
        (["--set", "parallel={mode: fixed, dp: 3, micro_batch: 5}"], 2, "batch.global 16 is not a multiple of it"),
        (["--set", "parallel={mode: fixed, pp: 4}"], 4, "4 devices are needed, 3 are usable"),
        (["--set", "model={preset: tiny-1m}"], 2, "no such folder; make it with `hpctrain data prepare"),
    ],
)
def test_errors_are_one_line_and_write_nothing(call, arguments, code, message):
    found, out, err = call(*arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert "\n" not in err
    assert not (call.folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("", "the file is empty"),
        ("steps: 3", "not valid JSON"),
        ('{"nodes": 3}', "nodes"),
        (
            '{"schema": "hpctrain.plan/v1", "pp": 1}',
            "found 'hpctrain.plan/v1'; this version reads 'hpctrain.topology/v1'",
        ),
        (None, "no such file"),
    ],
)
def test_a_bad_topology_is_named(call, text, message):
    if text is not None:
        (call.folder / "bad.json").write_text(text)
    code, _, err = call(topology_file="bad.json")
    assert code == 2
    assert "bad.json" in err
    assert message in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("topology.json", "schema: found 'hpctrain.topology/v1'; this version reads 'hpctrain.run/v1'"),
        ("empty.yaml", "empty.yaml:1: found no keys; `hpctrain init` writes"),
        (".", "is a folder, expected a regular file; give a file in it"),
    ],
)
def test_another_file_in_place_of_the_run_file_is_one_line(call, given, message):
    (call.folder / "empty.yaml").write_text("# nothing yet\n")
    code, _, err = call(run_file=given)
    assert code == 2
    assert message in err
    assert "\n" not in err


def test_a_plan_for_one_device_has_no_plural(call):
    code, out, _ = call("--nodelist", "local0", "--explain")
    assert code == 0
    assert "parameters on 1 device of 1 node: pp 1 × dp 1 × tp 1" in out
    assert "Idle" not in out


def test_a_missing_run_file_is_named(call):
    code, _, err = call(run_file="none.yaml")
    assert code == 2
    assert "none.yaml: no such file" in err


def test_the_steps_of_a_run_correct_the_constants(call, topology, run, tmp_path):
    asked, made = run(), topology((1.0, 1.0))
    folder = tmp_path / "before"
    folder.mkdir()
    write_generation(folder, make_plan(asked, asked.spec(), made), asked, made, truth(compute={"type1.0": 1.5}), 60)
    plain = json.loads(call("--json")[1])
    code, out, err = call("--json", "--explain", "--calibrate-from", str(folder))
    told = Plan.from_json(json.loads(out))
    assert code == 0
    assert told.profile.compute == pytest.approx({"type1.0": 1.5})
    assert told.predicted.step_time_s["total"] > 1.1 * plain["predicted"]["step_time_s"]["total"]
    assert "corrected by 55 steps of before (generation 0)" in err
    assert "compute of type1.0: × 1.50" in err
    assert "tensor_parallel: no matrix was shared" in err
    topology((2.0,)).write(tmp_path / "topology.json")
    code, _, err = call("--calibrate-from", str(folder))
    assert (code, "its steps were made on type1.0, the topology has type2.0" in err) == (2, True)
    (folder / "metrics.jsonl").unlink()
    code, _, err = call("--calibrate-from", str(folder))
    assert (code, "generation 0 made 0 steps, at least 50 are needed" in err) == (2, True)
    assert "constants: those of the package" in call("--explain")[1]
