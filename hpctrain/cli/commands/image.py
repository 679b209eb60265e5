"""`hpctrain image build|show|check`: the container images in which runs take place."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

import hpctrain
from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import EXIT_FAILED, EXIT_WARNINGS, InputError
from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes
from hpctrain.cli.answers import JSON_OPTION, print_json
from hpctrain.cli.options.parameters import PATH
from hpctrain.cli.views.console import Console
from hpctrain.container.build import PREFIX, Builder, build, build_options, has_user_namespaces, labels_of
from hpctrain.container.check import ImageFinding, worst_level
from hpctrain.container.entry import find_runtime, this_host
from hpctrain.container.recipe import (
    BASES,
    Base,
    Environment,
    ImageRecipe,
    debian_packages,
    default_environment,
    definition,
    locked_packages,
    parse_base,
)
from hpctrain.launch.preflight.queue_checks import examine_container
from hpctrain.records.run.run import Container
from hpctrain.runs.code_copy import git_state

_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}
_ENVIRONMENTS = ("install", "copy", "bind")


@click.group()
def image_command() -> None:
    """Container images for runs: build one, read its labels, check that runs from this machine work in it."""


@image_command.command("build")
@click.option("--base", default="cuda", metavar="BASE", help=f"{BASES}.")
@click.option("--from", "source", metavar="IMAGE", help="Another image of a registry than the base's own.")
@click.option("-o", "--output", type=PATH, default=Path("train.sif"), help="Where the image goes.")
@click.option(
    "--environment",
    type=click.Choice(_ENVIRONMENTS),
    help="Packages: installed by pip, copied from here, or seen from here. Default: install; of cpu-small bind.",
)
@click.option("--extra", "extras", multiple=True, help="Also the packages of this extra of hpctrain: hf, data.")
@click.option("--cuda", default="12.8", help="CUDA of PyTorch's image; see `image check`.")
@click.option("--index", metavar="URL", help="Further package index for pip: one with CPU or ROCm builds of torch.")
@click.option("--remote", is_flag=True, help="Have it built by the remote builder that you are logged in to.")
@click.option("--force", is_flag=True, help="Build although an image of the same inputs is there.")
@click.option("--dry-run", "--show", "dry_run", is_flag=True, help="Print the definition file; build nothing.")
@JSON_OPTION
def build_command(
    base: str, source: str | None, output: Path, remote: bool, force: bool, dry_run: bool, as_json: bool, **more: Any
) -> None:
    """Build a container image with the Python packages of this installation, in exactly these versions.

    The image does not contain hpctrain: each run brings its own copy. The image is tested (two processes add up a
    tensor) before it is moved to its path. An existing image of the same inputs is not built again.
    """
    runner = SystemRunner()
    recipe = _recipe(parse_base(base, source), **more)
    if recipe.base.docker is not None and recipe.base.docker.dropped:
        dropped = "; ".join(recipe.base.docker.dropped)
        click.echo(f"left out, as they say nothing in this kind of image: {dropped}", err=True)
    commit = str(git_state(Path(hpctrain.__file__).resolve().parent, runner).get("commit", ""))
    if dry_run:
        text = definition(recipe, commit)
        print_json({"definition": text}) if as_json else click.echo(text, nl=False)
        return
    runtime = find_runtime("auto", shutil.which)
    options = build_options(this_host(), has_user_namespaces(), runtime, recipe, remote)
    builder = Builder(runtime, options, os.environ, runner, SystemClock(), _say)
    built = build(recipe, output, commit, builder, force)
    if as_json:
        print_json({**dataclasses.asdict(built), "image": str(output)})
        return
    how = f"built in {built.time_s:.0f} s" if built.fresh else "up to date"
    click.echo(f"{output}: {how}, {format_bytes(built.size_bytes)}; look at it with `hpctrain image check {output}`")


def _say(line: str) -> None:
    click.echo(f"  {line}", err=True)


def _recipe(
    base: Base, environment: Environment | None, extras: tuple[str, ...], cuda: str, index: str | None
) -> ImageRecipe:
    how = environment or default_environment(base.kind)
    if how != "install" and base.kind in ("cuda", "rocm", "cpu"):
        raise InputError(
            f"--environment: found {how}; --base {base.kind} takes install alone, its Python is another one"
        )
    if how == "install" and base.kind == "cpu-small":
        raise InputError("--environment: found install; --base cpu-small has no pip and takes bind or copy")
    return ImageRecipe(
        base=base,
        environment=how,
        lock=locked_packages(extras),
        python=".".join(platform.python_version_tuple()[:2]),
        packages_folder=sysconfig.get_path("purelib"),
        debian=debian_packages(SystemRunner()) if base.kind == "cpu-small" else [],
        cuda=cuda,
        index=index,
    )


@image_command.command("show")
@click.argument("image", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print all labels as a JSON object.")
def show_command(image: Path, as_json: bool) -> None:
    """Print what an image was built from: version, git commit, base, and the hashes of its lock and its inputs."""
    _require(image)
    labels = labels_of(find_runtime("auto", shutil.which), image, SystemRunner())
    if as_json:
        click.echo(json.dumps(labels, indent=1))
        return
    ours = {name.removeprefix(PREFIX): value for name, value in labels.items() if name.startswith(PREFIX)}
    if not ours:
        click.echo(f"{image}: not built by `hpctrain image build`; --json prints its {len(labels)} labels")
    for name, value in sorted(ours.items()):
        click.echo(f"{name:12} {value}")


@image_command.command("check")
@click.argument("image", type=PATH)
@click.option("--bind", "binds", multiple=True, metavar="SOURCE[:TARGET[:ro]]", help="As in container.binds.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list on stdout and nothing else.")
def check_command(image: Path, binds: tuple[str, ...], as_json: bool) -> None:
    """Start IMAGE as a run would, and say what does not fit this machine.

    Checked are Python and the packages that must be the same inside and outside, torch with gloo and NCCL, driver and
    CUDA, InfiniBand, home and temporary folders, whether signals reach a process inside, and how long the image takes
    to start. To check each node of a job: `srun --ntasks-per-node=1 hpctrain image check IMAGE`.

    Exit code 1 if a run would fail, 3 if there are only notes.
    """
    _require(image)
    container = Container(image=str(image.resolve()), binds=list(binds))
    findings = examine_container(container, os.environ)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        Console().print(_table(findings))
    sys.exit({"problem": EXIT_FAILED, "note": EXIT_WARNINGS, "ok": 0}[worst_level(findings)])


def _require(image: Path) -> None:
    if not image.exists():
        raise InputError(f"{image}: there is no such image; build one with `hpctrain image build -o {image}`")


def _table(findings: list[ImageFinding]) -> Table:
    table = Table(box=None, show_header=False, expand=True)
    table.add_column(width=7)
    for share in (2, 4, 5):
        table.add_column(ratio=share, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=_STYLE[finding.level])
        table.add_row(level, Text(finding.name), Text(finding.value), Text(finding.words))
    return table
