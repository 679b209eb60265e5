"""The copy of a person's code that a queued run uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.runs.code_copy import copy_code, omitted_secrets_text


def git(folder: Path, *words: str) -> str:
    argv = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    done = SystemRunner().run(argv, timeout_s=20)
    assert done.code == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "project"
    (source / "package" / "__pycache__").mkdir(parents=True)
    (source / "package" / "model.py").write_text("SIZE = 1\n")
    (source / "package" / "__pycache__" / "model.pyc").write_bytes(b"x")
    (source / ".venv").mkdir()
    (source / ".venv" / "huge").write_bytes(b"x")
    return source


def test_the_copy_is_the_code_as_it_was(source: Path, tmp_path: Path) -> None:
    git(source, "init", "-q")
    git(source, "add", "package/model.py")
    git(source, "commit", "-q", "-m", "first")
    (source / "package" / "model.py").write_text("SIZE = 2\n")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    copy_code(source, run_folder, SystemRunner())
    (source / "package" / "model.py").write_text("SIZE = 3\n")
    copied = sorted(str(p.relative_to(run_folder)) for p in (run_folder / "code").rglob("*") if p.is_file())
    assert copied == ["code/package/model.py"]
    assert (run_folder / "code/package/model.py").read_text() == "SIZE = 2\n"
    state = json.loads((run_folder / "code.json").read_text())
    assert state == {"source": str(source), "commit": git(source, "rev-parse", "HEAD"), "dirty": True}


def test_a_folder_without_git_has_no_git_state(source: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    copy_code(source, run_folder, SystemRunner())
    assert json.loads((run_folder / "code.json").read_text()) == {"source": str(source)}


@pytest.mark.parametrize("base", ["experiments", "."])
def test_run_folders_within_the_code_are_no_code(source: Path, base: str) -> None:
    for name in ("before", "now"):
        run_folder = source / base / name
        run_folder.mkdir(parents=True)
        (run_folder / "run.yaml").touch()
        (run_folder / "key").touch()
    copy_code(source, run_folder, SystemRunner())
    files = [str(path.relative_to(run_folder / "code")) for path in (run_folder / "code").rglob("*") if path.is_file()]
    assert files == ["package/model.py"]


def test_links_lead_where_they_led(source: Path, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("data")
    (source / "outside").symlink_to("../data.txt")
    (source / "package" / "inside").symlink_to("model.py")
    (source / "package" / "absolute").symlink_to(source / "package" / "model.py")
    (source / "left_out").symlink_to(".venv/huge")
    (source / "alias").symlink_to("package")
    run_folder = tmp_path / "runs" / "deep" / "run"
    run_folder.mkdir(parents=True)
    copy_code(source, run_folder, SystemRunner())
    (source / "package" / "model.py").write_text("SIZE = 2\n")
    copy = run_folder / "code"
    assert (copy / "outside").read_text() == "data"
    assert (copy / "left_out").read_text() == "x"
    for name in ("package/inside", "package/absolute", "alias/model.py"):
        assert (copy / name).read_text() == "SIZE = 1\n", name


SECRETS = [
    ".aws/credentials", ".boto", ".cache/huggingface/token", ".config/gcloud/access_tokens.db", ".docker/config.json",
    ".env.local", ".git-credentials", ".gnupg/private-keys-v1.d/x", ".huggingface/token", ".kube/config", ".my.cnf",
    ".npmrc", ".pgpass", ".pypirc", ".s3cfg", ".ssh/config", ".vault-token", "Credentials.json", "deploy/id_ed25519",
    "deploy/kubeconfig", "deploy/prod.tfvars", "deploy/server.PEM", "terraform.tfstate",
]  # fmt: skip
NO_SECRETS = [
    "config.json", "credentials/__init__.py", "credentials/store.py", "docker/config.json", "package/tokens.txt",
    "secrets.py", "settings.xml", "tokenizer.json",
]  # fmt: skip


def test_files_that_hold_tokens_stay_where_they_are(source: Path, tmp_path: Path) -> None:
    for name in (*SECRETS, *NO_SECRETS):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("canary")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    copy_code(source, run_folder, SystemRunner())
    copy = run_folder / "code"
    copied = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert copied == sorted([*NO_SECRETS, "package/model.py"])
    told = json.loads((run_folder / "code.json").read_text())["left_out"]
    assert all(any(f"{secret}/".startswith(f"{name}/") for name in told) for secret in SECRETS)
    assert "code: not copied, as such files hold tokens: .aws" in omitted_secrets_text(run_folder)[0]


def test_a_damaged_code_json_is_one_line(tmp_path: Path) -> None:
    assert omitted_secrets_text(tmp_path) == []
    (tmp_path / "code.json").write_text("{")
    with pytest.raises(FileError, match=r"code\.json.*: not valid JSON"):
        omitted_secrets_text(tmp_path)


def test_what_is_no_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"code: .*missing: no such folder"):
        copy_code(tmp_path / "missing", tmp_path, SystemRunner())
    data = tmp_path / "data"
    data.mkdir()
    with (data / "corpus.bin").open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(InputError, match="allowed: 256"):
        copy_code(data, tmp_path, SystemRunner())
