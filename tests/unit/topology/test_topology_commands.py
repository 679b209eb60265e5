"""`hpctrain topology`: files in, files out, and one line for what is wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.base.errors import HpctrainError
from hpctrain.base.package_data import package_data_path
from hpctrain.cli.commands.topology import FORMATS
from hpctrain.cli.commands.topology import topology_command as command
from hpctrain.records.topology.topology import Topology

LAPTOP, PAPER = (
    str(package_data_path("topology", "laptop-4-nodes.json")),
    str(package_data_path("topology", "paper-32-gpu.json")),
)


def run(*argv: str) -> Result:
    return CliRunner().invoke(command, list(argv), catch_exceptions=True)


def error_of(result: Result) -> tuple[int, str]:
    assert isinstance(result.exception, HpctrainError), result.output
    return result.exception.exit_code, str(result.exception)


def test_one_file_goes_to_stdout_a_file_or_a_folder(tmp_path: Path) -> None:
    printed = run("export", LAPTOP, "--to", "slurm")
    run("export", LAPTOP, "--to", "slurm", "-o", str(tmp_path / "my.conf"))
    run("export", LAPTOP, "--to", "slurm", "-o", str(tmp_path))

    assert printed.output.splitlines()[-1] == "SwitchName=all Nodes=local[0-3]"
    assert (tmp_path / "my.conf").read_text() == (tmp_path / "topology.conf").read_text() == printed.output


def test_answers_for_programs_name_the_files_or_hold_their_texts(tmp_path: Path) -> None:
    metis = ("export", PAPER, "--to", "metis", "--nodelist", "n[01-08]", "--json")
    held = json.loads(run(*metis).output)["files"]
    written = json.loads(run(*metis, "-o", str(tmp_path / "metis")).output)["files"]
    assert [Path(file["path"]).read_text() for file in written] == [file["text"] for file in held]
    assert [(file["name"], file["text"]) for file in written] == [("clusterfile.json", None), ("hostfile", None)]
    prior = tmp_path / "prior.json"
    run("export", LAPTOP, "--to", "slurm", "-o", str(tmp_path / "topology.conf"))
    made = run("import", str(tmp_path / "topology.conf"), "-o", str(prior), "--json")
    assert json.loads(made.output) == {"topology": str(prior), "nodes": 4, "devices": 0, "clusters": 1}


def test_several_files_go_to_a_folder_that_is_made(tmp_path: Path) -> None:
    done = run("export", PAPER, "--to", "metis", "--nodelist", "n[01-08]", "-o", str(tmp_path / "metis"))

    assert done.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "metis").iterdir()) == ["clusterfile.json", "hostfile"]
    assert len((tmp_path / "metis" / "hostfile").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["export", PAPER, "--to", "metis", "--nodelist", "n[01-08]"], 2, "2 files (clusterfile.json, hostfile)"),
        (["export", PAPER, "--to", "metis", "--nodelist", "n01", "-o", "{taken}"], 2, "it is a file; 2 files need"),
        (["export", PAPER, "--to", "metis", "--nodelist", "n01", "-o", "{tmp}/a/b"], 2, "cannot make the folder"),
        (["export", PAPER, "--to", "slurm", "--nodelist", "x1"], 4, "no figures of x1"),
        (["export", LAPTOP, "--to", "nccl"], 2, "no GPU in this topology"),
        (["import", "{tmp}/absent.conf"], 2, "no such file"),
        (["import", "{binary}"], 2, "not a text file in UTF-8"),
        (["import", "{taken}", "--nodelist", "n1"], 2, "Slurm's files name their nodes themselves"),
        (["import", "{taken}", "--from", "nccl", "--nodelist", "n[1"], 2, "write it like n[0-2]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    tmp_path: Path, argv: list[str], code: int, words: str
) -> None:
    (tmp_path / "taken").write_text("SwitchName=s Nodes=n1\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {"tmp": tmp_path, "taken": tmp_path / "taken", "binary": tmp_path / "binary"}

    found, text = error_of(run(*(word.format(**places) for word in argv)))

    assert found == code
    assert words in text
    assert "\n" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "taken"]


def test_an_import_writes_a_prior_that_can_be_shown_and_exported(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(
        "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n3\nSwitchName=r Switches=a,b\n"
    )
    prior = tmp_path / "prior.json"

    done = run("import", str(tmp_path / "topology.conf"), "-o", str(prior))

    assert done.output == f"wrote {prior}: 3 node(s), 0 device(s), 3 cluster(s), as a prior\n"
    assert "verdict: none, nothing was measured" in run("show", str(prior)).output
    text = run("export", str(prior), "--to", "slurm").output
    assert text.splitlines()[1:] == (tmp_path / "topology.conf").read_text().splitlines()


def test_colours_are_for_terminals_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("show", LAPTOP).output
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = run("show", LAPTOP).output
    monkeypatch.setenv("NO_COLOR", "1")
    unwanted = run("show", LAPTOP).output

    assert "\x1b[" not in plain
    assert "\x1b[3" in forced
    assert not any(code in unwanted for code in ("\x1b[31", "\x1b[32", "\x1b[33"))


def test_every_format_is_explained() -> None:
    text = CliRunner().invoke(command, ["export", "--help"]).output

    assert all(f"\n  {name} " in text for name in FORMATS)


def test_show_prints_json_that_is_the_file() -> None:
    assert Topology.model_validate_json(run("show", LAPTOP, "--json").output) == Topology.read(Path(LAPTOP))
