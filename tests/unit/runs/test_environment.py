"""The installed packages are read from the names of their folders, as importlib.metadata finds them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.runs.environment import (
    installed_packages,
    requirements_text,
    software_versions,
    torch_build,
    without_credentials,
)


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
    install(site, "b-2.dist-info", {"url": "https://me:secret@host/b.git?t=1", "vcs_info": {"commit_id": "0af1"}})
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
        f"-e {tmp_path}  # e==5",
        "plain-one==1.0+cu128",
    ]


def test_pip_reads_the_lock_of_this_environment(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    packages = installed_packages()
    file = tmp_path / "requirements.lock"
    file.write_text(requirements_text(software_versions(packages, {}), packages))
    code = (
        "import sys; from pip._internal.req.req_file import parse_requirements as p; "
        "from pip._internal.network.session import PipSession as s; "
        "print(len([r.requirement for r in p(sys.argv[1], session=s())]))"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == len([package for package in packages if package.name != "pip"])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60) | st.sampled_from([b"[]", b'{"url": 1}', b'{"url": "https://["}', b'{"url": "a\\n-e ."}'])
)
def test_any_direct_url_json_is_read_or_left_out(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a-1.dist-info").mkdir(exist_ok=True)
    (tmp_path / "a-1.dist-info" / "direct_url.json").write_bytes(data)
    packages = installed_packages([str(tmp_path)])
    text = requirements_text(software_versions(packages, {}), packages)
    assert len(text.splitlines()) <= 2


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
