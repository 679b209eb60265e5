"""Secrets are named in the run file, and come from the environment or from a file that only its owner can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import RUN

from hpctrain.base.errors import InputError
from hpctrain.base.process import SystemRunner
from hpctrain.records.run.run import Run
from hpctrain.runs.code_copy import copy_code
from hpctrain.runs.secrets import check_secrets, secret_values


def run_with(**more: Any) -> Run:
    return Run.model_validate({**RUN, **more})


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"cluster": {"setup": ["module load x", "export HF_TOKEN=canary123"]}}, "cluster.setup[1]"),
        ({"cluster": {"sbatch": ["--comment=API_KEY=canary123"]}}, "cluster.sbatch[0]"),
        ({"container": {"image": "a.sif", "env": {"HF_TOKEN": "canary123"}}}, "container.env.HF_TOKEN"),
        ({"data": {"train": ["https://me:canary123@host/x"]}}, "data.train[0]"),
        ({"model": {"import": "a.b:c", "args": {"api_key": "canary123"}}}, "model.args.api_key"),
    ],
)
def test_a_secret_in_the_run_file_is_refused_with_its_place_and_without_itself(more: Any, where: str) -> None:
    with pytest.raises(InputError) as caught:
        check_secrets(run_with(**more), {})
    said = str(caught.value)
    assert said.startswith(f"{where}: found what looks like a secret")
    assert "secrets: [" in said
    assert "canary" not in said


def test_what_only_names_a_secret_is_taken() -> None:
    container = {"image": "a.sif", "env": {"HF_TOKEN": "$HF_TOKEN", "MODE": "online-and-long"}}
    check_secrets(run_with(container=container, cluster={"setup": ["export HF_TOKEN=$(cat ~/t)"]}), {})


def test_a_secret_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    run = run_with(secrets=["HF_TOKEN", "OTHER_KEY"])
    with pytest.raises(InputError, match="secrets: OTHER_KEY is not in the environment; export it here"):
        check_secrets(run, {"HF_TOKEN": "x", "OTHER_KEY": ""})
    assert secret_values(run, {"HF_TOKEN": "x", "OTHER_KEY": "y", "MORE": "z"}) == {"HF_TOKEN": "x", "OTHER_KEY": "y"}


def test_a_file_gives_those_that_are_named_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# mine\nexport HF_TOKEN='from file'\n\nLD_PRELOAD=/evil.so\n")
    path.chmod(0o600)
    run = run_with(secrets=["HF_TOKEN", "OTHER"], secrets_file=str(path))
    assert secret_values(run, {"HF_TOKEN": "from environment", "OTHER": "o"}) == {"HF_TOKEN": "from file", "OTHER": "o"}


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("HF_TOKEN=x\n")
    path.chmod(0o640)
    with pytest.raises(InputError, match=r"can be read by others \(mode 640\); allowed is your own alone: chmod 600"):
        secret_values(run_with(secrets=["HF_TOKEN"], secrets_file=str(path)), {})


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot read: No such file"), ("canary\n", r"tokens:1: found no NAME=value"), (b"\xff\xfe", "is not text")],
)
def test_a_file_that_cannot_be_used_is_told_without_its_content(tmp_path: Path, text: Any, said: str) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o600)
    with pytest.raises(InputError, match=said) as caught:
        secret_values(run_with(secrets=["HF_TOKEN"], secrets_file=str(path)), {})
    assert "canary" not in str(caught.value)


def test_files_that_hold_tokens_are_not_copied_with_the_code_and_are_named(tmp_path: Path) -> None:
    source, target = tmp_path / "project", tmp_path / "run"
    (source / "conf" / ".aws").mkdir(parents=True)
    target.mkdir()
    for name in ("train.py", "secrets.py", "conf/.env", "conf/.aws/credentials", ".netrc", "id_ed25519", "me.pem"):
        (source / name).write_text("canary\n" if not name.endswith(".py") else "")
    copy_code(source, target, SystemRunner())
    copied = sorted(str(path.relative_to(target / "code")) for path in (target / "code").rglob("*") if path.is_file())
    assert copied == ["secrets.py", "train.py"]
    left_out = json.loads((target / "code.json").read_text())["left_out"]
    assert left_out == [".netrc", "conf/.aws", "conf/.env", "id_ed25519", "me.pem"]


def test_the_git_state_holds_no_address_of_a_remote(tmp_path: Path) -> None:
    source, target = tmp_path / "project", tmp_path / "run"
    source.mkdir()
    target.mkdir()
    (source / "a.py").write_text("")
    for words in (
        ["init", "-q"],
        ["remote", "add", "origin", "https://me:canary@host/x.git"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first"],
    ):
        assert SystemRunner().run(["git", "-C", str(source), *words], timeout_s=20).code == 0
    copy_code(source, target, SystemRunner())
    assert not any(b"canary" in path.read_bytes() for path in target.rglob("*") if path.is_file())
