"""The installed packages are read from the names of their folders, as importlib.metadata finds them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from hpctrain.runs.environment import (
    installed_packages,
    requirements_text,
    software_versions,
    torch_build,
    without_credentials,
)

GIT = {"vcs": "git", "commit_id": "0af1"}


def install(site: Path, folder: str, direct_url: object = None) -> None:
    (site / folder).mkdir(parents=True)
    if direct_url is not None:
        (site / folder / "direct_url.json").write_text(json.dumps(direct_url))


def test_the_same_packages_as_importlib_metadata() -> None:
    known = {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in reversed(list(importlib.metadata.distributions()))
    }
    assert {package.name: package.version for package in installed_packages()} == known


def test_the_origin_of_a_package_is_that_of_pip_without_tokens(tmp_path: Path) -> None:
    site, wheel = tmp_path / "site", tmp_path / "c-3.whl"
    wheel.touch()
    install(site, "plain_one-1.0+cu128.dist-info")
    install(site, "b-2.dist-info", {"url": "https://me:secret@host/b.git?t=1", "vcs_info": GIT})
    install(site, "c-3.dist-info", {"url": wheel.as_uri(), "archive_info": {"hashes": {"sha256": "1" * 64}}})
    install(site, "d-4.dist-info", {"url": "file:///croot/d_1700/work", "dir_info": {}})
    install(site, "e-5.dist-info", {"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    packages = installed_packages([str(site)])
    text = requirements_text(software_versions(packages, {}), packages)
    assert "secret" not in text
    assert text.splitlines()[2:] == [
        "b @ git+https://host/b.git@0af1",
        f"c @ {wheel.as_uri()}#sha256={'1' * 64}",
        "d==4",
        f"-e {tmp_path.as_uri()}  # e==5",
        "plain-one==1.0+cu128",
    ]


def test_pip_installs_again_from_each_origin(tmp_path: Path) -> None:
    """pip itself reads the file, and installs a package whose folder has a blank from there."""
    pytest.importorskip("pip")
    site, project = tmp_path / "site", tmp_path / "my [x] proj's"
    (project / "sub").mkdir(parents=True)
    for folder, name in ((project, "a"), (project / "sub", "b")):
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
        )
    install(site, "a-1.dist-info", {"url": project.as_uri(), "dir_info": {"editable": True}})
    install(site, "b-1.dist-info", {"url": project.as_uri(), "subdirectory": "sub", "dir_info": {"editable": True}})
    install(site, "c-1.dist-info", {"url": project.as_uri(), "dir_info": {}})
    install(site, "d-1.dist-info", {"url": "ssh://git:secret@host/d.git", "vcs_info": GIT, "subdirectory": "py/d"})
    install(site, "e-1.dist-info", {"url": "https://host/e", "vcs_info": {"vcs": "hg", "commit_id": "0af1"}})
    install(site, "f-2004d.dist-info", {"url": "https://host/f", "vcs_info": {"vcs": "cvs", "commit_id": "0af1"}})
    install(site, "g-1.dist-info", {"url": "https://host/g", "archive_info": {"hashes": ["sha256"]}})
    install(site, "h-1.dist-info", {"url": "https://host/h ;${HOME}", "archive_info": {}})
    packages = installed_packages([str(site)])
    text = requirements_text(software_versions(packages, {}), packages)
    url = project.as_uri()
    assert text.splitlines()[1:] == [
        f"-e {url}  # a==1",
        f"-e '{url}#subdirectory=sub'  # b==1",
        f"c @ {url}",
        "d @ git+ssh://git@host/d.git@0af1#subdirectory=py/d",
        "e @ hg+https://host/e@0af1",
        "f===2004d",
        "g==1",
        "h @ https://host/h%20%3B%24%7BHOME%7D",
    ]
    assert read_by_pip(text, tmp_path) == [
        (None, str(project)), (None, str(project)), ("c", str(project)), ("d", None), ("e", None), ("f", None),
        ("g", None), ("h", None),
    ]  # fmt: skip


PIP_READS = """
import json, sys
from pip._internal.network.session import PipSession
from pip._internal.req.constructors import install_req_from_parsed_requirement
from pip._internal.req.req_file import parse_requirements
lines = parse_requirements(sys.argv[1], session=PipSession())
items = [install_req_from_parsed_requirement(line) for line in lines]
print(json.dumps([(item.name, item.link.file_path if item.link and item.link.is_file else None) for item in items]))
"""


def read_by_pip(text: str, folder: Path) -> list[tuple[str | None, str | None]]:
    """Return (name, local file or folder) of each requirement of a file, as pip reads it."""
    file = folder / "requirements.lock"
    file.write_text(text)
    done = subprocess.run([sys.executable, "-c", PIP_READS, file], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [(name, path) for name, path in json.loads(done.stdout)]


def test_pip_reads_the_lock_of_this_environment(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    packages = installed_packages()
    text = requirements_text(software_versions(packages, {}), packages)
    assert len(read_by_pip(text, tmp_path)) == len([package for package in packages if package.name != "pip"])


TEXTS = st.text(max_size=20) | st.sampled_from(
    ["file:///tmp", "https://u:p@[::1]/x[a b]", "ssh://a:b:c@h", "file:///" + "x" * 300, "https://[", "a\n-e .", "git"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda of: st.lists(of, max_size=2), max_leaves=3
)
ORIGINS = st.fixed_dictionaries(
    {"url": TEXTS},
    optional={
        "subdirectory": VALUES,
        "vcs_info": VALUES
        | st.fixed_dictionaries({"vcs": st.sampled_from(["git", "hg"]) | VALUES, "commit_id": VALUES}),
        "dir_info": VALUES | st.fixed_dictionaries({"editable": VALUES}),
        "archive_info": VALUES | st.fixed_dictionaries({"hashes": VALUES | st.fixed_dictionaries({"sha256": VALUES})}),
    },
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | VALUES.map(json.dumps).map(str.encode) | ORIGINS.map(json.dumps).map(str.encode))
@example(b"[" * 60000)
@example(b'{"url": "https://h/a", "archive_info": {"hashes": [1]}}')
@example(b'{"url": "file:///' + b"x" * 5000 + b'"}')
@example(b'{"url": "https://h/\\ud800"}')
def test_of_any_direct_url_json_the_package_stays_and_has_one_line_that_pip_accepts(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "a-1.dist-info").mkdir(exist_ok=True)
    (tmp_path / "a-1.dist-info" / "direct_url.json").write_bytes(data)
    packages = installed_packages([str(tmp_path)])
    assert [(package.name, package.version) for package in packages] == [("a", "1")]
    (line,) = requirements_text(software_versions(packages, {}), packages).splitlines()[1:]
    if line.startswith("-e "):
        assert len(shlex.split(line, comments=True)) == 2
    else:
        assert Requirement(line).name == "a"


def test_torch_says_what_it_was_built_for_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    version = tmp_path / "torch" / "version.py"
    version.write_text("__version__ = '2.7.1+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    assert torch_build([str(tmp_path)]) == {"cuda": "12.8"}
    version.write_text("cuda = None\nhip = '6.3.42131-fa1d09cbd'\n")
    assert torch_build([str(tmp_path)]) == {"hip": "6.3.42131-fa1d09cbd"}
    assert torch_build([]) == {}


def test_of_all_variables_only_the_modules_are_kept() -> None:
    software = software_versions([], {"LOADEDMODULES": "gcc/12.2:cuda/12.8", "HF_TOKEN": "hf_secret"})
    assert software.modules == ["gcc/12.2", "cuda/12.8"]
    assert "secret" not in str(software)


def test_an_address_loses_all_that_may_hold_a_token() -> None:
    assert without_credentials("https://u:p@host:8080/a.git?key=1#sha256=2") == "https://host:8080/a.git"
    assert without_credentials("ssh://git:p@host:22/a.git") == "ssh://git@host:22/a.git"
