"""The tutorial word by word: its commands run on the lab, typed into one shell in an empty home folder."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.requires("slurm", "lab"), pytest.mark.timeout(1500)]

PAGES = ("1-storage", "2-environment", "3-first-run")
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = {
    "environment modules": "the lab has none",
    "conda": "not installed, and no channel can be reached",
    "pixi": "not installed, and no channel can be reached",
    "a wheel from the folder of hpctrain": "pip wheel fetches the build backend; the test builds the wheel beforehand",
    "the login node has a network": "a lab has none",
    "the login node has no network": "its first step is on another machine; the test lays its own packages there",
    "Apptainer or SingularityCE": "test_run_in_image builds an image",
    "a model to start from": "no hub can be reached",
}
"""Blocks that other clusters need, by the words behind *Variant:*, and why they do not run here."""


@dataclass
class Block:
    """Commands of the page, and the output that the page shows of them."""

    page: str
    variant: str
    """What the page calls the variant; '' for commands that every reader types."""
    commands: str
    shown: str = ""


def blocks_of(page: str, text: str) -> list[Block]:
    blocks: list[Block] = []
    end = 0
    for match in FENCED.finditer(text):
        before = text[end : match.start()].rpartition("\n\n")[0].rpartition("\n\n")[2] or text[end : match.start()]
        end = match.end()
        if match[1] == "sh":
            variant = re.match(r"\*Variant: ([^*]+?)\.?\*", before.strip())
            blocks.append(Block(page, variant[1] if variant else "", match[2]))
        elif match[1] == "text":
            blocks[-1].shown = match[2]
    return blocks


@pytest.fixture(scope="module")
def blocks(repository: Path) -> list[Block]:
    folder = repository / "docs" / "tutorial"
    assert sorted(path.stem for path in folder.glob("*.md")) == [*PAGES, "README"]
    return [block for page in PAGES for block in blocks_of(page, (folder / f"{page}.md").read_text())]


@pytest.fixture
def account(tmp_path: Path, repository: Path) -> dict[str, str]:
    """An empty home folder on a machine whose reader has a Python and the wheel of hpctrain; its environment."""
    home, programs, packages = (tmp_path / name for name in ("anna", "bin", "packages"))
    for folder in (home, programs, packages):
        folder.mkdir()
    (programs / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3").resolve())
    for site in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for entry in site.iterdir():
            if not entry.name.startswith(("hpctrain", "_hpctrain", "__editable__")) and entry.suffix != ".pth":
                link = packages / entry.name
                if not link.exists():
                    link.symlink_to(entry)
    wheels = home / "work" / "wheels"
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(wheels), str(repository)]
    subprocess.run(argv, check=True, capture_output=True, timeout=600)
    return {
        "HOME": str(home), "USER": "anna", "LANG": "C.UTF-8", "PATH": f"{programs}:/usr/bin:/bin:/usr/sbin:/sbin",
        "OMP_NUM_THREADS": "1", "PACKAGES": str(packages), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip


def script_of(blocks: list[Block]) -> str:
    """Return the script that types the blocks into one shell; a line before each says which it is."""
    lines = ["set -e", "exec 2>&1"]
    for number, block in enumerate(blocks):
        # On a busy machine a probe ends with "go with warnings", which is the exit code 3.
        accepted = " || [ $? = 3 ]" if "hpctrain probe" in block.commands else ""
        lines += [f'echo "@@ {number} after $SECONDS s"', block.commands.rstrip() + accepted]
        if "-m venv" in block.commands:
            # What pip would fetch: the packages of this test's own environment, with a newer setuptools than venv's.
            lines.append('site=$(echo "$WORK"/venv/lib/python3.*/site-packages)')
            lines.append('rm -rf "$site"/setuptools*; echo "$PACKAGES" > "$site/packages.pth"')
    return "\n".join(lines)


def test_every_command_of_the_tutorial_works(cluster, blocks: list[Block], account: dict[str, str]) -> None:
    left_out = {block.variant: block.commands for block in blocks if block.variant}
    print("left out:", *(f"{name}: {LEFT_OUT.get(name)}" for name in left_out), sep="\n  ")
    assert set(left_out) == set(LEFT_OUT)
    typed = [block for block in blocks if not block.variant]
    lab = {name: cluster.env[name] for name in ("HPCTRAIN_LAB", "SLURM_CONF")}
    done = subprocess.run(
        ["bash", "-c", script_of(typed)], cwd=account["HOME"], env={**account, **lab}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, timeout=800, check=False,  # only ends a hang
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    told = done.stdout.replace(account["HOME"], "/home/anna")
    outputs = re.split(r"^@@ .*\n", told, flags=re.MULTILINE)[1:]
    assert len(outputs) == len(typed)
    missing = [
        f"{block.page}: {line}" for block, output in zip(typed, outputs, strict=True)
        for line in block.shown.splitlines() if not is_printed(line, output)
    ]  # fmt: skip
    assert missing == [], done.stdout


def is_printed(line: str, output: str) -> bool:
    """Whether the output has such a line: its words between quantities and ellipses are the same."""
    words = [part.strip() for part in re.split(r"[\d.:]*\d[\d.:]*\S*(?: (?:us|ms|s|min|KiB|MiB|GiB)\b)?|…", line)]
    return any(all(word in printed for word in words) for printed in output.splitlines())
