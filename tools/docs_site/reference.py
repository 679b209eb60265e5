"""The generated parts of the reference. The site puts one in place of a line `<!-- reference: NAME -->` of a page."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable
from typing import get_args

from hpctrain.base import errors
from hpctrain.base.errors import HpctrainError
from hpctrain.cli.commands.run_file import KINDS
from hpctrain.doctor import account_findings, cluster_findings, findings
from hpctrain.doctor.facts import Level, Subject
from hpctrain.records.history.fault import FAULTS
from hpctrain.records.history.run_log import EVENTS
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
    "rank_metric": "metrics-ranks.jsonl",
    "node_metric": "metrics-nodes.jsonl",
    "step_spans": "profile/step-*.spans.json",
    "event": "events.jsonl",
    "generation": "generations/gen-*.json",
    "witness": "generations/witness-*.json",
    "adapted_plan": "generations/adapted-*.json",
    "successor": "successors.jsonl",
    "bad_node": "bad_nodes.jsonl",
    "run_provenance": "provenance.json",
    "node_environment": "environments.jsonl",
    "sweep": "sweep.json",
    "manifest": "checkpoints/step-*/manifest.json",
    "corpus": "index.json of a corpus folder",
    "past_run": "history.jsonl",
    "tracked": "tracking/*.json",
    "selfcheck": "The file of hpctrain selfcheck -o",
}
"""Kind of a file -> heading of its section, in order. The run file has a page of its own."""

_LINE = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)


def with_reference(markdown: str) -> str:
    """Return a page's text with the generated parts that it names.

    Raises:
        KeyError: no part has a name that the page uses.
    """
    return _LINE.sub(lambda line: PARTS[line[1]](), markdown)


def run_file_reference() -> str:
    """Return the tables of all keys of the run file."""
    return KeyTables(KINDS["run"], 2).markdown()


def file_reference() -> str:
    """Return a list of the kinds of files, and a section with the keys of each."""
    rows = [[f"[{title}](#{kind})", code(kind), _text(kind)] for kind, title in FILES.items()]
    parts = [table(["file", "KIND", "what it is"], rows)]
    for kind, title in FILES.items():
        parts += [f"## {title} {{ #{kind} }}", _text(kind), KeyTables(KINDS[kind], 3).markdown()]
    return "\n\n".join(parts)


def _text(kind: str) -> str:
    return escaped(KINDS[kind].__doc__ or "")


def event_reference() -> str:
    """Return the table of the kinds of events."""
    rows = [[f"{code(kind)}{{ #{kind} }}", escaped(text)] for kind, text in EVENTS.items()]
    return table(["kind", "what it says; keys of `data` in code"], rows)


def fault_reference() -> str:
    """Return the table of faults, in order."""
    rows = []
    for fault in FAULTS:
        kinds, texts = [code(kind) for kind in fault.kinds], [f"“{text}”" for text in fault.texts]
        xids = [f"Xid {', '.join(map(str, fault.xids))}"] if fault.xids else []
        matches = ", ".join([*kinds, *texts, *xids]) or "every other error"
        rows.append([f"{code(fault.name)}{{ #{fault.name} }}", escaped(fault.words), fault.blame, escaped(matches)])
    return table(["fault", "what it is", "to blame", "errors that match"], rows)


def exit_code_reference() -> str:
    """Return the table of exit codes, from the constants of `base.errors` and the strings below them."""
    body = ast.parse(inspect.getsource(errors)).body
    rows = []
    for statement, below in itertools.pairwise(body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).startswith("EXIT_"):
            assert isinstance(below, ast.Expr), "each exit code has a string below it"
            rows.append([code(ast.literal_eval(statement.value)), escaped(ast.literal_eval(below.value))])
    return table(["code", "meaning"], rows)


def error_reference() -> str:
    """Return the table of the classes of errors, each with the exit code of a command that ends by it."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, HpctrainError)]
    rows = [[code(kind.__name__), code(kind.exit_code), escaped(kind.__doc__ or "")] for kind in classes]
    return table(["error", "exit code", "meaning"], rows)


def finding_reference() -> str:
    """Return the table of what `hpctrain doctor` checks: of each function that makes findings, their names and levels,
    and what its docstring says."""
    rows = []
    for module in (cluster_findings, findings, account_findings):
        tree = ast.parse(inspect.getsource(module))
        subjects = {
            statement.targets[0].id: ast.literal_eval(statement.value.args[1])
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Call)
            and ast.unparse(statement.value.func) == "partial"
        }
        for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _called(node) in subjects]
            if not calls:
                continue
            names = dict.fromkeys(name for call in calls for name in _finding_names(call.args[0], function, tree))
            found = {text for call in calls for text in _texts(call.args[1], function)}
            levels = [level for level in get_args(Level) if level in found]
            text = (ast.get_docstring(function) or "").partition("\n\n")[0]
            rows.append([subjects[_called(calls[0])], ", ".join(names), ", ".join(levels), escaped(text)])
    rows.sort(key=lambda row: get_args(Subject).index(row[0]))
    return table(["subject", "name", "levels", "what is checked"], rows)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _finding_names(name: ast.expr, function: ast.FunctionDef, tree: ast.Module) -> list[str]:
    """Return the names that the findings of a function may have: texts in code; in italics what they name."""
    parameters = [argument.arg for argument in function.args.args]
    if isinstance(name, ast.Name) and name.id in parameters:
        place = parameters.index(name.id)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == function.name]
        texts = [text for call in calls for text in _texts(call.args[place], function)]
        return [code(text) for text in texts] or [f"*{name.id}*"]
    roots = [node for node in ast.walk(name) if isinstance(node, ast.Name | ast.Constant)]
    root = min(roots, key=lambda node: node.col_offset)
    if isinstance(root, ast.Constant):
        return [code(root.value)]
    return [code(text) for text in _texts(name, function)] or [f"*{root.id}*"]


def _texts(value: ast.expr, function: ast.FunctionDef) -> list[str]:
    """Return the texts in an expression; of a variable, those in what the function assigns to it."""
    if isinstance(value, ast.Name):
        return [
            text
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if ast.unparse(target) == value.id
            for text in _texts(node.value, function)
        ]
    return [node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


PARTS: dict[str, Callable[[], str]] = {
    "commands": command_reference,
    "run_file": run_file_reference,
    "files": file_reference,
    "events": event_reference,
    "faults": fault_reference,
    "findings": finding_reference,
    "exit_codes": exit_code_reference,
    "errors": error_reference,
}
"""Name of a generated part -> the function that returns it, as Markdown."""
