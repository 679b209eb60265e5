"""The site of the documents: it builds without a warning, it loads nothing from elsewhere, a wrong link ends it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from hpctrain.cli.main import cli
from hpctrain.doctor.facts import Subject
from tools.docs_site.navigation import CONFIG, ROOT
from tools.docs_site.reference import FILES, KINDS, finding_reference

LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//""")


def build(target: Path, config: Path = CONFIG) -> subprocess.CompletedProcess[str]:
    """Run MkDocs as `make docs` does, with the site in `target`."""
    argv = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(target)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    target = tmp_path_factory.mktemp("site")
    done = build(target)
    assert done.returncode == 0, done.stderr
    return target


def test_each_kind_of_file_has_a_section_of_the_reference():
    assert {"run", *FILES} == set(KINDS)


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    assert (site / "search" / "search_index.js").is_file(), "the search works from files by this script"


@pytest.mark.slow
def test_links_of_the_repository_lead_to_pages_of_the_site(site):
    """A page from outside docs/ is linked as a page, code is not linked."""
    assert '<a href="slurm.html">' in (site / "submitting.html").read_text()
    assert '<a href="submitting.html">' in (site / "slurm.html").read_text()
    assert "hpctrain/runs/code_copy.py" not in (site / "security.html").read_text()


@pytest.mark.slow
def test_the_reference_has_every_key_of_a_run_file_and_every_option(site):
    keys = (ROOT / "tests" / "golden" / "run_keys.txt").read_text().split()
    anchors = set(re.findall(r' id="([^"]+)"', (site / "reference" / "run-file.html").read_text()))
    # A key of one of several forms, as of compression, has the form in its anchor.
    general = {re.sub(r"-[^.]*", "", anchor) for anchor in anchors} | anchors
    # What hpctrain itself writes into the file repeats sections that the reference describes once.
    written_by_people = {key for key in keys if not key.startswith(("model.found.dims.", "model.measured."))}
    assert len(written_by_people) > 140
    # The codec of a layer group is described where the codec of all layers is: the table of groups links there.
    described_once = {key.replace("compression.groups.", "compression.") for key in written_by_people}
    assert described_once - general == set()
    commands = (site / "reference" / "commands.html").read_text()
    for name, command in all_commands(cli, ""):
        assert f'id="{name}"' in commands
        for option in (option for param in command.params for option in param.opts if option.startswith("--")):
            assert option in commands


def test_the_findings_of_the_doctor_are_listed_with_levels_and_meaning():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in finding_reference().splitlines()[2:]]
    assert [row for row in rows if len(row) != 4 or not all(row)] == []
    assert list(dict.fromkeys(row[0] for row in rows)) == list(get_args(Subject))
    by_name = {row[1]: row for row in rows}
    levels, meaning = by_name["`cred_expire`"][2:]
    assert levels == "ok, note"
    assert "seconds a requeued job waits" in meaning
    assert by_name["*partition*"][2] == "ok, note"
    assert by_name["`lock`, `rename`, `hard link`"][2] == "ok, problem"


def all_commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, with its anchor in the reference."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield path + name, command
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{path}{name}-")


@pytest.mark.slow
def test_links_to_nothing_end_the_build(tmp_path):
    docs, config = tmp_path / "docs", tmp_path / "mkdocs.yml"
    docs.mkdir()
    (docs / "a.md").write_text("# A\n\n[b](#no-such-heading) [c](no-such-page.md) [d](index.md#no-such-heading)\n")
    nav = re.compile(r"^nav:\n(?:(?:  | *-).*\n)+", re.MULTILINE)
    hooks = f"{ROOT}/tools/docs_site"
    config.write_text(nav.sub("nav: [index.md, a.md]\n", CONFIG.read_text()).replace("tools/docs_site", hooks))
    done = build(tmp_path / "site", config)
    assert done.returncode == 1
    about_a = [line for line in done.stderr.splitlines() if line.startswith("WARNING") and "'a.md'" in line]
    assert sorted(re.search(r"link '([^']*)'", line)[1] for line in about_a) == [
        "#no-such-heading", "index.md#no-such-heading", "no-such-page.md"
    ]  # fmt: skip
