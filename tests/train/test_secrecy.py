"""A run with tokens around it: they are nowhere afterwards, and while it runs nobody else can see or reach it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from train_site import Site, processes_of, wait_for, wait_for_step

from hpctrain.records.history.run_log import read_events

pytestmark = pytest.mark.slow

CANARY = "canary0123456789abcdefABCDEF"
TOKENS = {
    "HF_TOKEN": CANARY,
    "WANDB_API_KEY": CANARY,
    "https_proxy": f"http://me:{CANARY}@127.0.0.1:9",
    "HOOK": f"http://127.0.0.1:9/{CANARY}",
}


def files_with(folder: Path, text: str) -> list[str]:
    """Files below a folder that hold the text, in their bytes or their names."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if text in str(path) or (path.is_file() and text.encode() in path.read_bytes())
    ]


def open_to_others(folder: Path) -> list[str]:
    """What below a folder others could read by its own mode, were the folder not closed."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]


def command_lines() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or [])


def listening(folder: Path) -> list[tuple[str, int]]:
    """Addresses that the processes of a run listen at: agents, the store, and torch's own sockets."""
    found = []
    for process in processes_of(folder):
        try:
            connections = process.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        found += [tuple(item.laddr) for item in connections if item.status == psutil.CONN_LISTEN]
    return found


def test_tokens_around_a_run_are_nowhere_and_it_is_reached_only_at_its_own_address(site: Site, tmp_path: Path) -> None:
    code, node_disk = site.path / "secrecy-code", tmp_path / "disk"
    code.mkdir()
    node_disk.mkdir()
    (code / "mine.py").write_text("")
    (code / ".env").write_text(f"HF_TOKEN={CANARY}\n")
    known = set((site.path / "runs").glob("*"))
    process = site.start(
        "submit", "run.yaml", "--topology", "four.json", "--json", "--set", "name=secrecy", "--set", "cluster.nodes=2",
        "--set", "steps=1000000", "--set", f"code={code}", "--set", "secrets=[HF_TOKEN]", "--set", "data.stage=node",
        "--set", f"data.stage_folder={node_disk}", "--set", "notify={url_env: HOOK, on: [cancelled]}",
        env=TOKENS,
    )  # fmt: skip
    said = process.communicate(timeout=600)[0]
    folder = site.run_folder(known)
    wait_for_step(folder, 2)

    # While it runs.
    assert not any(CANARY in line for line in command_lines())
    assert len(processes_of(folder)) >= 5  # the supervisor, two agents, two workers
    addresses = listening(folder)
    assert len(addresses) >= 4
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    secret = (folder / "key").read_text().strip()
    assert not any(secret in line for line in command_lines())

    cancelled = site.command("cancel", folder.name, env=TOKENS)
    assert cancelled.returncode == 0, cancelled.stderr
    wait_for(lambda: not processes_of(folder), 60, "the end of the run")
    report = site.command("report", folder.name, env=TOKENS)
    assert report.returncode == 0, report.stderr

    # Afterwards.
    assert files_with(folder, CANARY) == []
    assert files_with(node_disk, CANARY) == []
    assert CANARY not in said + cancelled.stdout + cancelled.stderr + report.stdout + report.stderr
    assert (folder / "report.html").is_file()
    assert "code: not copied, as such files hold tokens: .env" in said
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    written = [name for name in open_to_others(folder) if not name.endswith(".agent.log")]
    assert [name for name in written if name.startswith(("checkpoints/step", "agents/", "logs/0/"))] == []
    assert files_with(folder, secret) == ["key"]
    kinds = [event.kind for event in read_events(folder / "events.jsonl")]
    assert kinds.count("data_staged") == 2
    assert "checkpoint_saved" in kinds
