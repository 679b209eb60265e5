"""The commands in the recipes for workflow programs exist, with their options."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from hpctrain.cli.main import cli
from hpctrain.records.run.run import read_run

FOLDERS = {"snakemake": "Snakefile", "nextflow": "main.nf"}


@pytest.mark.parametrize("program", FOLDERS)
def test_commands_and_options_of_a_recipe_exist(program: str, repository: Path) -> None:
    text = (repository / "docs/examples" / program / FOLDERS[program]).read_text()
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("#", "//")))
    commands = re.findall(r'hpctrain (\w+(?: prepare)?)((?:[^\n]*\\\n)?[^\n]*(?:\n\s+" --[^\n]*)?)', code)
    assert {verb for verb, _ in commands} == {"data prepare", "submit", "watch", "eval", "export", "report"}
    for verb, words in commands:
        command: click.Command = cli
        for name in verb.split():
            assert isinstance(command, click.Group)
            known = command.get_command(click.Context(command), name)
            assert known is not None, verb
            command = known
        options = {option for parameter in command.params for option in parameter.opts}
        used = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", words))
        assert used <= options, (verb, words)
    submit = next(words for verb, words in commands if verb == "submit")
    assert {"--json", "--set"} <= set(submit.split())


@pytest.mark.parametrize("program", FOLDERS)
def test_the_run_file_of_a_recipe_is_valid(program: str, repository: Path) -> None:
    run = read_run(repository / "docs/examples" / program / "run.yaml")
    assert run.cluster.kind == "slurm"
    assert Path(run.data.train_folders[0]).name == "data"
