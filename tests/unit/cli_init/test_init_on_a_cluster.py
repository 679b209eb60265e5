"""`hpctrain init` on a machine of a Slurm cluster: what it chooses, and what its comments say."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from captured_slurm import CapturedSlurm
from fake_slurm import FakeSlurm

from hpctrain.records.run.run import read_run

Call = Callable[..., Any]
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "init"
A100, RTX, MIG = "Gres=gpu:a100:4(S:0-7)", "Gres=gpu:rtx4090:8", "Gres=gpu:a100_3g.20gb:2"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one of a cluster with these GPUs, whose user has these accounts."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def make(accounts: str = "one", **changes: str) -> None:
        texts = {text: changes[name] for name, text in (("a100", A100), ("rtx", RTX), ("mig", MIG)) if name in changes}
        slurm = CapturedSlurm(texts, accounts)
        monkeypatch.setattr("hpctrain.cli.commands.run_file.SystemRunner", lambda: slurm)

    return make


CLUSTERS = {
    "h100": {"a100": "Gres=gpu:h100:8", "rtx": "Gres=gpu:h100:8"},
    "v100": {"a100": "Gres=gpu:tesla_v100-sxm2-32gb:4", "rtx": "Gres=gpu:k80:2"},
    "untyped": {"a100": "Gres=gpu:4", "rtx": "Gres=gpu:8", "accounts": "no_accounting"},
    "cpu": {"a100": "Gres=(null)", "rtx": "Gres=(null)", "mig": "Gres=(null)", "accounts": "unknown_user"},
    "accounts": {"accounts": "several"},
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_run_file_of_a_cluster(call: Call, tmp_path: Path, cluster: Callable[..., None], name: str) -> None:
    cluster(**CLUSTERS[name])
    done = call("init")
    assert done.code == 0, done.err
    assert read_run(tmp_path / "run.yaml").cluster.kind == "slurm"
    assert (tmp_path / "run.yaml").read_text() == (GOLDEN / f"{name}.yaml").read_text()
    assert done.out.splitlines()[-1] == "then: hpctrain submit run.yaml"
    assert done.err == ""


def test_without_slurm_the_run_is_of_this_machine(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = call("init")
    assert (tmp_path / "run.yaml").read_text() == (GOLDEN / "local.yaml").read_text()
    assert done.out.splitlines()[-1] == "then: hpctrain train run.yaml --local 2"


def test_local_is_the_same_on_a_cluster(call: Call, tmp_path: Path, cluster: Callable[..., None]) -> None:
    cluster()
    done = call("init", "--local")
    assert (tmp_path / "run.yaml").read_text() == (GOLDEN / "local.yaml").read_text()
    assert "hpctrain train run.yaml --local 2" in done.out
    refused = call("init", "two.yaml", "--local", "-A", "chem")
    assert (refused.code, "--account: only for a Slurm cluster" in refused.err) == (2, True)


def test_options_choose_partition_and_account(call: Call, tmp_path: Path, cluster: Callable[..., None]) -> None:
    cluster(accounts="several")
    done = call("init", "-p", "short", "-A", "astro")
    assert done.code == 0
    assert "cluster.time: found 00:01:00; allowed: more than 00:03:00" in done.err
    asked = read_run(tmp_path / "run.yaml").cluster
    assert (asked.partition, asked.account) == ("short", "astro")
    refused = call("init", "two.yaml", "-p", "nowhere")
    assert (refused.code, "found 'nowhere'; allowed on this cluster: low, high," in refused.err) == (2, True)
    refused = call("init", "two.yaml", "-p", "high", "-A", "astro")
    assert (refused.code, "allowed in partition 'high': physics, chem" in refused.err) == (4, True)
    assert not (tmp_path / "two.yaml").exists()


def test_another_account_is_taken_where_only_that_one_gets_gpus(
    call: Call, tmp_path: Path, cluster: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two partitions have GPUs: `low`, which is closed here, and `high`, for the accounts physics and chem."""
    cluster(accounts="several", mig="Gres=(null)")
    real = CapturedSlurm._text
    closed = {
        "partitions.txt": ("State=UP", "State=DOWN", 1),
        "sacctmgr.txt": ("hydra|bio|astro|", "hydra|bio|chem|", 1),
    }

    def changed(slurm: CapturedSlurm, name: str) -> str:
        text = real(slurm, name)
        return text.replace(*closed[name]) if name in closed else text

    monkeypatch.setattr(CapturedSlurm, "_text", changed)
    assert call("init").code == 0
    asked = read_run(tmp_path / "run.yaml").cluster
    assert (asked.partition, asked.account) == ("high", "chem")
    assert "of your accounts one that may use partition high; you also have bio" in (tmp_path / "run.yaml").read_text()


class Terminal(io.StringIO):
    """A person who types these lines."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("accounts", "typed", "account"), [("several", "astro\nn\n", "astro"), ("one", "n\n", "chem")])
def test_only_a_choice_among_several_accounts_is_asked_for(
    call: Call, tmp_path: Path, cluster: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    accounts: str, typed: str, account: str
) -> None:  # fmt: skip
    cluster(accounts=accounts)
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    done = call("init", "--name", "x", "--preset", "tiny-1m", "--steps", "3")
    assert done.code == 0, done.err
    assert read_run(tmp_path / "run.yaml").cluster.account == account


def test_what_the_site_sets_is_left_to_it(
    call: Call, tmp_path: Path, cluster: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster()
    path = tmp_path / "config" / "hpctrain" / "site.yaml"
    path.parent.mkdir(parents=True)
    profiles = {"hydra": {"match": "hydra", "cluster": {"account": "chem", "gpu_type": "rtx4090"}}}
    path.write_text(yaml.safe_dump({"schema": "hpctrain.site/v1", "profiles": profiles}))
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    assert call("init").code == 0
    text = (tmp_path / "run.yaml").read_text()
    assert "  # partition: gpu              # low, from SBATCH_PARTITION\n" in text
    assert f"  # account: my-project         # chem, from profile 'hydra' of {path}\n" in text
    assert f"  # gpu_type: a100              # rtx4090, from profile 'hydra' of {path}\n" in text
    assert "  nodes: 1            # partition low gives a job no more nodes with GPUs\n" in text
    asked = read_run(tmp_path / "run.yaml")
    assert (asked.cluster.partition, asked.cluster.account, asked.cluster.gpu_type) == (None, None, None)
    assert asked.precision == "bf16"
    profiles["hydra"]["cluster"] = {"kind": "local"}
    path.write_text(yaml.safe_dump({"schema": "hpctrain.site/v1", "profiles": profiles}))
    assert call("init", "here.yaml").code == 0
    assert read_run(tmp_path / "here.yaml").cluster.kind == "local"


def test_a_controller_that_is_away_leaves_the_choice_to_submit(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of kind local would train on the login node."""
    fake = FakeSlurm()
    fake.away = True
    monkeypatch.setattr("hpctrain.cli.commands.run_file.SystemRunner", lambda: fake)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = call("init")
    assert done.code == 0
    assert "hpctrain: partition, account, GPU type and time are not chosen (the Slurm controller is away" in done.err
    assert len(done.err.splitlines()) == 1
    asked = read_run(tmp_path / "run.yaml").cluster
    assert asked.model_dump(exclude_defaults=True) == {"kind": "slurm", "nodes": "2"}
    assert "# default: hpctrain submit chooses the one that fits best" in (tmp_path / "run.yaml").read_text()
    assert done.out.splitlines()[-1] == "then: hpctrain submit run.yaml"


@pytest.mark.parametrize(
    ("preset", "steps", "time", "why"),
    [
        ("tiny-1m", 200, "00:25:00", "a guess: 20 s of steps at 6% of the peak of 8 a100"),
        ("xl-7b", 2_000_000, "1-00:00:00", "a day, then it continues as a new job; a guess:"),
    ],
)
def test_the_time_limit_follows_from_model_and_steps(
    call: Call, tmp_path: Path, cluster: Callable[..., None], preset: str, steps: int, time: str, why: str
) -> None:
    cluster()
    assert call("init", "--preset", preset, "--steps", steps).code == 0
    assert read_run(tmp_path / "run.yaml").cluster.time == time
    assert why in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("preset", "nodes", "told"),
    [
        ("llama-3b", "2", ""),
        ("llama-13b", "2", ""),
        (
            "xxl-70b",
            "2",
            "xxl-70b needs about 10 nodes with 4 a100, and the partition gives a job 2 of them; choose a smaller one",
        ),
    ],
)
def test_a_model_gets_the_nodes_that_hold_it_or_a_warning(
    call: Call, tmp_path: Path, cluster: Callable[..., None], preset: str, nodes: str, told: str
) -> None:
    cluster()
    done = call("init", "--preset", preset)
    assert done.code == 0
    assert read_run(tmp_path / "run.yaml").cluster.nodes == nodes
    assert told in done.err
    assert bool(told) == bool(done.err)


def test_a_large_model_gets_more_nodes(call: Call, tmp_path: Path, cluster: Callable[..., None]) -> None:
    cluster(a100="Gres=gpu:v100:4", rtx="Gres=gpu:v100:4")
    assert call("init", "--preset", "llama-8b", "-p", "low").code == 0
    assert (
        "nodes: 3            # for the weights, gradients and optimizer in the memory of v100"
        in (tmp_path / "run.yaml").read_text()
    )
