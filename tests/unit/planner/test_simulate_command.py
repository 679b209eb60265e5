"""`hpctrain simulate` at the command line."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from hpctrain.base.errors import HpctrainError
from hpctrain.cli.commands.simulate import simulate_command as command
from hpctrain.records.run.run import read_run

pytestmark = pytest.mark.usefixtures("short_annealing")

RUN = {
    "steps": 10,
    "model": {"dims": {"layers": 6, "dim": 128, "heads": 4, "vocab": 512}},
    "data": {"train": ["data"], "seq_len": 64},
    "batch": {"global": 16},
    "parallel": {"mode": "fixed", "pp": 3, "dp": 1, "tp": 1, "schedule": "1f1b"},
}


@pytest.fixture
def folder(tmp_path, topology):
    """Plan, run file and topology beside each other, as in a run folder."""
    from hpctrain.planner import make_plan

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    made = topology((1.0, 1.0, 1.0))
    made.write(tmp_path / "topology.json")
    asked = read_run(tmp_path / "run.yaml")
    make_plan(asked, asked.spec(), made).write(tmp_path / "plan.json")
    return tmp_path


def call(*arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if isinstance(result.exception, HpctrainError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_plan_beside_its_files_is_drawn_in_80_columns(folder):
    code, out, _ = call(folder / "plan.json")
    assert code == 0
    rows = [line for line in out.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]
    assert [len(row) for row in rows] == [80, 80, 80]
    assert all(set(row[2:]) <= set("FBSU·") for row in rows)
    assert rows[2][2] == "·"
    assert "F forward, B backward" in out


def test_what_ifs_tell_before_after_and_the_term_to_blame(folder):
    code, out, _ = call(folder / "plan.json", "--slow", "local1=0.5", "--link", "local0:local1=0.5", "--jitter", "0.1")
    assert code == 0
    assert "times as long: " in out
    assert "1000 steps drawn: median" in out
    assert "no spread of latencies" in out


def test_the_machine_form_is_all_there_is_on_stdout(folder):
    code, out, err = call(folder / "plan.json", "--lose", "local2", "--json", "--jitter", "0.2", "--draws", "50")
    assert code == 0
    told = json.loads(out)
    assert told["after"]["plan"]["pp"] * told["after"]["plan"]["dp"] * told["after"]["plan"]["tp"] <= 2
    assert not any(place.startswith("local2") for place in told["after"]["plan"]["ranks"])
    assert told["drawn"]["p50_s"] < told["drawn"]["p95_s"]
    assert "without parallel.mode fixed" in told["notes"][0]
    assert "No slower." in err, "two nodes do without a pipeline of three"


def test_the_page_holds_every_action_and_no_address(folder):
    target = folder / "step.html"
    code, _, _ = call(folder / "plan.json", "--slow", "local0=0.9", "--html", target)
    page = target.read_text(encoding="utf-8")
    assert code == 0
    assert page.count('<script type="application/json"') == 2
    assert "2F0" in page
    assert "1B3" in page
    assert "<link" not in page
    assert 'src="http' not in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--slow", "local9=0.5"], 2, "found node local9, not in the topology"),
        (["--slow", "local[0-1]=0.5", "--slow", "local1=0.9"], 2, "--slow: found local1 twice; give it once"),
        (["--slow", "local1"], 2, "--slow: found 'local1'; write it like name=0.5"),
        (["--slow", "local1=-1"], 2, "with a number above 0"),
        (["--slow", "local1=1", "--slow", "local1=0.5"], 2, "found local1 twice"),
        (["--link", "local1=0.5"], 2, "a link is between two nodes: a:b=0.25"),
        (["--lose", "local[0-2]", "--set", "recovery.min_nodes=1"], 4, "0 nodes would be left"),
        (["--set", "batch.global=8"], 2, "replicas: found 16 sequences, batch.global is 8"),
        (["--topology", "nowhere.json"], 2, "no such file"),
    ],
)
def test_what_cannot_be_is_one_line(folder, arguments, code, message):
    found, _, text = call(folder / "plan.json", *arguments)
    assert found == code
    assert message in text


def test_a_month_of_failures_on_ten_thousand_gpus():
    code, out, _ = call("failures", "--trials", "5", "--spares", "10", "--queue-wait", "600")
    assert code == 0
    assert "1250 nodes, a failure every 5 h 2 min" in out
    assert "10 spares" in out
    code, out, err = call("failures", "--trials", "2", "--interval", "30", "--json")
    assert [row["mode"] for row in json.loads(out)["rows"]] == ["in_place"]
    assert "Requeueing is left out" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "1", "--save", "300"], "shorter than a checkpoint takes"),
        (["--node-mtbf", "0.001"], "with more nothing would be trained"),
        (["--interval", "nan"], "is not a number to compute with"),
        (["--gpus", "0"], "0 is not in the range"),
    ],
)
def test_failures_that_cannot_be_simulated(arguments, message):
    code, _, text = call("failures", *arguments)
    assert code == 2
    assert message in text
