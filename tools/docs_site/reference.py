"""The generated parts of the reference. The site puts one in place of a line `<!-- reference: NAME -->` of a page."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpctrain.cli.commands.run_file import KINDS
from tools.docs_site.commands import command_reference
from tools.docs_site.markdown import code, escaped, table
from tools.docs_site.schemas import KeyTables

FILES = {
    "site": "site.yaml",
    "recipe": "recipe.yaml",
    "lab": "The spec of a lab",
    "topology": "topology.json",
    "plan": "plan.json",
    "metric": "metrics.jsonl",
    "event": "events.jsonl",
    "generation": "generations/gen-*.json",
    "successor": "successors.jsonl",
    "bad_node": "bad_nodes.jsonl",
    "run_provenance": "provenance.json",
    "node_environment": "environments.jsonl",
    "manifest": "checkpoints/step-*/manifest.json",
    "corpus": "index.json of a corpus folder",
    "past_run": "history.jsonl",
    "selfcheck": "The file of hpctrain selfcheck -o",
}
"""Kind of a file -> heading of its section, in order. The run file has a page of its own."""

_LINE = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)


def with_reference(markdown: str) -> str:
    """Return a page's text with the generated parts that it names."""
    return _LINE.sub(lambda line: PARTS[line[1]](), markdown)


def run_file_reference() -> str:
    """Return the tables of all keys of the run file."""
    return KeyTables(KINDS["run"], 2).markdown()


def file_reference() -> str:
    """Return a list of the kinds of files, and a section with the keys of each."""
    assert {"run", *FILES} == set(KINDS), "each kind of `hpctrain schema` has a section"
    rows = [[f"[{title}](#{kind})", code(f"hpctrain schema {kind}"), _text(kind)] for kind, title in FILES.items()]
    parts = [table(["file", "its JSON schema", "what it is"], rows)]
    for kind, title in FILES.items():
        parts += [f"## {title} {{ #{kind} }}", _text(kind), KeyTables(KINDS[kind], 3).markdown()]
    return "\n\n".join(parts)


def _text(kind: str) -> str:
    return escaped(KINDS[kind].__doc__ or "")


PARTS: dict[str, Callable[[], str]] = {
    "commands": command_reference,
    "run_file": run_file_reference,
    "files": file_reference,
}
"""Name of a generated part -> the function that returns it, as Markdown."""
