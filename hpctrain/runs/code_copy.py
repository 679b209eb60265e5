"""Copies your code (the folder `code` of the run file) into the run folder, so that a queued job runs the code as it
was when you submitted the run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.atomic import storage_errors, write_json
from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import Runner
from hpctrain.base.units import format_bytes
from hpctrain.records.format.document import read_json

CODE_FOLDER = "code"
"""Folder in a run folder with the run's copy of your code."""
IGNORED_PATTERNS = (
    ".git",
    ".venv",
    "venv",
    "__pycache__",
    "node_modules",
    "runs",
    "*.pyc",
    ".mypy_cache",
    ".pytest_cache",
)
"""Names of files and folders that are not copied because they are not code."""
SECRET_FILES = (
    # by the programs that write them
    ".netrc", "_netrc", ".git-credentials", ".config/git/credentials", ".pypirc", ".npmrc", ".yarnrc.yml", ".pgpass",
    ".my.cnf", ".mylogin.cnf", ".s3cfg", ".boto", ".passwd-s3fs", "rclone.conf", ".vault-token", ".terraformrc",
    "terraform.rc", "*.tfstate", "*.tfstate.backup", "*.tfvars", ".dockercfg", ".docker/config.json",
    "containers/auth.json", ".kube", "kubeconfig", "kubeconfig.*", "*.kubeconfig", ".aws", ".azure", ".config/gcloud",
    "application_default_credentials.json", ".oci", ".config/gh", ".config/hub", ".config/wandb", ".kaggle",
    "kaggle.json", ".huggingface", ".cache/huggingface/token", ".cache/huggingface/stored_tokens",
    "huggingface/token", ".comet.config", ".neptune", ".databrickscfg", ".snowsql", ".modal.toml", ".m2/settings.xml",
    ".gradle/gradle.properties", ".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials",
    ".composer/auth.json", ".condarc", ".htpasswd", ".ssh", ".gnupg", ".password-store", "*.kdbx", "*.keychain-db",
    # keys and certificates
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.jks",
    "*.keystore", "*.ppk", "*.gpg",
    # by what people call them
    ".env", ".env.*", "*.env", ".envrc", "credentials", "credentials.json", "client_secret*.json",
    "service-account*.json", "service_account*.json", ".secrets", "secrets.*", ".token", ".tokens", "*.token",
    "token.txt", ".api_key*", ".password*", ".passwd*",
)  # fmt: skip
"""Files and folders that usually hold access tokens, by name or by the end of their path. They are not copied,
and code.json lists those that were there."""
_SECRET = re.compile("|".join("/" + re.escape(form).replace(r"\*", "[^/]*") + "$" for form in SECRET_FILES))
LARGEST_BYTES = 256 * 2**20
"""Largest copy of code in bytes. A larger folder holds data too, which does not belong in every run folder."""


def copy_code(source: Path, run_folder: Path, runner: Runner) -> None:
    """Copy the folder `source` to the run folder without what is no code, such as run folders, and without files that
    usually hold secrets. code.json gets the git commit of `source` and the names of these secret files.

    Raises:
        InputError: `source` is no folder, or too large to be code.
        StorageError: the run folder cannot be written.
    """
    if not source.is_dir():
        raise InputError(f"code: {source}: no such folder; name the folder that holds your packages")
    size, omitted = _survey(source)
    if size > LARGEST_BYTES:
        raise InputError(
            f"code: {source}: holds {format_bytes(size)}, allowed: {format_bytes(LARGEST_BYTES)}; name a folder with "
            "code alone"
        )
    copy = run_folder / CODE_FOLDER
    with storage_errors(copy):
        shutil.copytree(source, copy, ignore=lambda *where: _no_code(*where) | _secret(*where), symlinks=True)
        _close(copy)
        _fix_links(source, copy)
    more: dict[str, object] = {"left_out": omitted} if omitted else {}
    write_json(run_folder / "code.json", {"source": str(source), **git_state(source, runner), **more})


def omitted_secrets_text(run_folder: Path) -> list[str]:
    """Return a line for a person that names the files of the user's code that were not copied into the run folder,
    because files of their names usually hold access tokens; [] if all were copied.

    Raises:
        UntrustedError: code.json or the run folder belongs to somebody else, or others can write to it.
        FileError: code.json is too large, cannot be read, or is not JSON.
    """
    path = run_folder / "code.json"
    value = read_json(path, owned=True) if path.exists() else {}
    names = value.get("left_out", []) if isinstance(value, dict) else []
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return [f"code: not copied, as such files hold tokens: {shown}"] if names else []


def code_on_path(run_folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return {"PYTHONPATH": the run's copy of the code, then PYTHONPATH of `environ`}; {} if there is no copy."""
    code = run_folder / CODE_FOLDER
    paths = [str(code), *filter(None, [environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} if code.is_dir() else {}


def import_code_first(code: Path) -> None:
    """Put the folder `code` first on this process's module path (sys.path), if the folder exists.

    The processes of a run import from no other folder outside the installed packages. The current folder is not
    searched, because a module that lies there by chance could replace another one.
    """
    if code.is_dir():
        sys.path.insert(0, str(code))


def git_state(source: Path, runner: Runner) -> dict[str, object]:
    """Return {"commit": hash, "dirty": whether files of `source` have uncommitted changes}; {} if `source` is in no git
    checkout."""
    try:
        commit = runner.run(["git", "-C", str(source), "rev-parse", "HEAD"], timeout_s=20)
        if commit.code != 0:
            return {}
        status = runner.run(["git", "-C", str(source), "status", "--porcelain", "--", "."], timeout_s=60)
    except CommandError:
        return {}
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def _survey(source: Path) -> tuple[int, list[str]]:
    """Return the total bytes of the files to copy, and the files and folders that usually hold secrets such as access
    tokens, which are not copied: paths relative to `source`, sorted."""
    size, omitted = 0, []
    for folder, names, files in os.walk(source):
        other = _no_code(folder, [*names, *files])
        secret = _secret(folder, [*names, *files]) - other
        omitted += [str(Path(folder, name).relative_to(source)) for name in secret]
        names[:] = [name for name in names if name not in secret | other]
        paths = [Path(folder, name) for name in files if name not in secret | other]
        size += sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())
    return size, sorted(omitted)


def _secret(folder: str, names: list[str]) -> set[str]:
    # A module may be called secrets.py, and a package credentials.
    paths = [Path(folder, name) for name in names if _SECRET.search(f"{folder}/{name}".lower())]
    return {path.name for path in paths if path.suffix != ".py" and not (path / "__init__.py").is_file()}


def _no_code(folder: str, names: list[str]) -> set[str]:
    """Return those of `names`, entries of `folder`, that are not copied because they are no code, such as run folders.
    Run folders are recognized by their files, because they may lie anywhere in your code."""
    runs = {name for name in names if all(Path(folder, name, file).is_file() for file in ("run.yaml", "key"))}
    return runs | set(shutil.ignore_patterns(*IGNORED_PATTERNS)(folder, names))


def _close(copy: Path) -> None:
    """Remove the permissions of group and others from all files and folders of the copy, because the source may have
    been open to them."""
    for folder, _, files in os.walk(copy):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o700)


def _fix_links(source: Path, copy: Path) -> None:
    """Make each symbolic link in the copy lead to the copy of its target, or to the target itself if the target was not
    copied."""
    root = source.resolve()
    for folder, names, files in os.walk(copy):
        for link in (Path(folder, name) for name in [*names, *files] if Path(folder, name).is_symlink()):
            target = (root / link.relative_to(copy).parent / link.readlink()).resolve()
            inside = copy / target.relative_to(root) if target.is_relative_to(root) else None
            if inside is not None and os.path.lexists(inside):
                target = Path(os.path.relpath(inside, link.parent))
            link.unlink()
            link.symlink_to(target)
