"""A Slurm that answers with the captured output of a real one (tests/golden/slurm), changed where a test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.base.errors import CommandError
from hpctrain.base.process import CommandResult

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "slurm"


def sections(text: str) -> dict[str, str]:
    """Section -> its text; the first line of a section is `== name`, with an exit code in some files."""
    found: dict[str, list[str]] = {}
    for line in text.split("\n"):
        if line.startswith("== "):
            found[line.removeprefix("== ")] = []
        elif found:
            found[list(found)[-1]].append(line)
    return {section: "\n".join(lines).strip("\n") for section, lines in found.items()}


class CapturedSlurm:
    """The clients that ask; none of those that submit or change anything."""

    def __init__(self, changes: Mapping[str, str], accounts: str, version: str = "22.05.8") -> None:
        """
        Args:
            changes: texts in the description of the nodes, and what stands there instead.
            accounts: section of sacctmgr.txt.
        """
        self._folder, self._changes, self._accounts = GOLDEN / version, changes, accounts

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        match list(argv):
            case ["sbatch", "--version"]:
                return CommandResult(tuple(argv), 0, f"slurm-wlm {self._folder.name}\n", "")
            case ["sacctmgr", *_]:
                told = sections(self._text("sacctmgr.txt"))
                (name,) = (name for name in told if name.split()[0] == self._accounts)
                code = int(name.split()[1])
                return CommandResult(tuple(argv), code, *(("", told[name]) if code else (told[name], "")))
            case ["scontrol", "show", "config"]:
                return CommandResult(tuple(argv), 0, self._text("config.txt"), "")
            case ["scontrol", "show", "partition", "-o"]:
                return CommandResult(tuple(argv), 0, self._text("partitions.txt"), "")
            case ["scontrol", "show", "node", "-o"]:
                text = sections(self._text("nodes.txt"))["idle"]
                for old, new in self._changes.items():
                    assert old in text
                    text = text.replace(old, new)
                return CommandResult(tuple(argv), 0, text, "")
        raise CommandError(f"{argv[0]}: not found on the path")

    def _text(self, name: str) -> str:
        return (self._folder / name).read_text()
