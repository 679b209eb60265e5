"""Definition files, each against its recorded text; what decides whether an image is built again; locks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.base.errors import FileError, InputError
from hpctrain.base.process import CommandResult
from hpctrain.container.dockerfile import read_dockerfile
from hpctrain.container.recipe import (
    Base,
    ImageRecipe,
    debian_packages,
    definition,
    inputs_sha256,
    locked_packages,
    parse_base,
)

LOCK = ["click==8.1.7", "nvidia-nccl-cu12==2.21.5", "torch==2.13.0"]
RECIPE = ImageRecipe(Base("cuda"), "install", LOCK, "3.11", "/venv/site-packages", [], version="0.1.0")
DOCKERFILE = """\
ARG WHO=me
FROM docker-archive:base.tar
ENV A=1 B="two words"
ENV OLD of two words
LABEL k="v w"
RUN ["echo", "x y"]
RUN echo $WHO && \\
    # a comment in between
    echo $OLD
ADD https://example.org/x.tgz /opt/
COPY --chown=1:1 a.txt /a.txt
WORKDIR /work
USER nobody
HEALTHCHECK CMD true
ENTRYPOINT ["python3", "-m"]
CMD ["http.server"]
"""


@pytest.fixture
def dockerfile(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path / "Dockerfile"


def matches(repository: Path, name: str, text: str) -> None:
    path = repository / "tests" / "golden" / "images" / name
    if os.environ.get("HPCTRAIN_RECORD"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("cuda", RECIPE),
        ("rocm", replace(RECIPE, base=Base("rocm", "rocm/pytorch:6.4"))),
        ("cpu", replace(RECIPE, base=Base("cpu"), index="https://example.org/cpu")),
        ("cpu-small", replace(RECIPE, base=Base("cpu-small"), environment="bind", debian=["bash=5.2", "libc6=2.36"])),
        ("localimage", replace(RECIPE, base=Base("localimage", "/images/a.sif"), environment="copy")),
    ],
)
def test_a_definition_is_as_recorded(repository: Path, name: str, recipe: ImageRecipe) -> None:
    matches(repository, f"{name}.def", definition(recipe, "0123abc", inputs="feed"))


def test_a_dockerfile_becomes_a_definition(repository: Path, dockerfile: Path) -> None:
    recipe = replace(RECIPE, base=parse_base(str(dockerfile)))
    text = definition(recipe, "0123abc", inputs="feed").replace(str(dockerfile.parent), "/here")
    matches(repository, "dockerfile.def", text)
    assert recipe.base.docker is not None
    assert [line.split()[0] for line in recipe.base.docker.dropped] == ["LABEL", "USER", "HEALTHCHECK"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a\nFROM b\n", "only Dockerfiles with one FROM"),
        ("RUN x\n", "only Dockerfiles with one FROM"),
        ("FROM a\nCOPY --from=b /x /y\n", r"Dockerfile:2: COPY: --from"),
        ("FROM a\nRUN [1, 2]\n", r"Dockerfile:2: RUN: found '\[1, 2\]'"),
        ("FROM a\nFLY away\n", r"Dockerfile:2: FLY: is no instruction"),
        ("FROM a\nENV\n", r"Dockerfile:2: ENV: has no arguments"),
        ("FROM a\nCOPY [broken\n", r"Dockerfile:2: COPY: found '\[broken'; write a JSON list, or paths"),
        ("FROM a\nADD https://example.org/x\n", r"Dockerfile:2: ADD: .*; write at least one source, and a target"),
    ],
)
def test_what_cannot_be_built_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(FileError, match=said):
        read_dockerfile(tmp_path / "Dockerfile")


def test_an_image_is_built_again_when_an_input_changes(dockerfile: Path) -> None:
    recipe = replace(RECIPE, base=parse_base(str(dockerfile)))
    before = inputs_sha256(recipe)
    assert inputs_sha256(replace(recipe, version="0.2.0")) == before  # hpctrain itself is not in it
    assert inputs_sha256(replace(recipe, lock=[*LOCK, "x==1"])) != before
    (dockerfile.parent / "a.txt").write_text("changed")
    assert inputs_sha256(recipe) != before


@pytest.mark.parametrize("text", ["cud", "localimage:/none.sif", "/none/Dockerfile"])
def test_an_unknown_base_is_said(text: str) -> None:
    with pytest.raises(InputError, match="--base"):
        parse_base(text)


def test_another_source_is_for_bases_of_a_registry() -> None:
    assert parse_base("cuda", "mine/pytorch:1").source == "mine/pytorch:1"
    with pytest.raises(InputError, match="--from"):
        parse_base("cpu-small", "x")


def test_the_lock_is_what_is_installed_and_needed() -> None:
    lock = dict(line.split("==") for line in locked_packages())
    assert {"torch", "submitit", "cloudpickle", "click", "psutil", "safetensors"} <= lock.keys()
    assert not {"pytest", "ruff", "mypy", "hpctrain"} & lock.keys()
    assert "+" not in lock["torch"]
    assert "transformers" in dict(line.split("==") for line in locked_packages(["hf"]))


class Dpkg:
    """Answers as dpkg-query does."""

    def __init__(self, *lines: str) -> None:
        self.text = "".join(line.replace(" | ", "\t", 3) + "\n" for line in lines)

    def run(self, argv: list[str], timeout_s: float | None = None, env: object = None) -> CommandResult:
        return CommandResult(tuple(argv), 0, self.text, "")


def test_debian_s_python_comes_with_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "2"))
    runner = Dpkg(
        "python3.11-minimal | 3.11.2 | installed | libc6 (>= 2.36), libssl3:any | other, libexpat1",
        "libc6 | 2.36 | installed | libgcc-s1, ", "libgcc-s1 | 12 | installed | libc6", "libssl3 | 3 | installed | ",
        "libexpat1 | 2.5 | config-files | ", "bash | 5 | installed | , ", "vim | 9 | installed | libc6",
    )  # fmt: skip
    expected = ["bash=5", "libc6=2.36", "libgcc-s1=12", "libssl3=3", "python3.11-minimal=3.11.2"]
    assert debian_packages(runner) == expected
    with pytest.raises(InputError, match="choose another base"):
        debian_packages(Dpkg("bash | 5 | installed | "))
