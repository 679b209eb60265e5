"""`hpctrain docs`: the pages of docs/, which are part of the installed package."""

from __future__ import annotations

import difflib
from pathlib import Path

import click
from rich.markdown import Markdown

from hpctrain.base.errors import InputError
from hpctrain.base.package_data import package_data_path
from hpctrain.cli.answers import JSON_OPTION, print_json
from hpctrain.cli.views.console import Console, table_console

WIDTH_MAX = 110
"""Columns of the longest line of a page on a terminal."""
_INDEX = "README"
"""Name of the page that stands for its folder."""


@click.command()
@click.argument("page", required=False)
@JSON_OPTION
def docs_command(page: str | None, as_json: bool) -> None:
    """Print a page of the documentation, or list the pages.

    A page is named by its path within docs/ without `.md`, such as submitting or decisions/0069-images; a folder's
    name stands for the page that lists the folder. Into a pipe, the page goes as it is written, in Markdown.
    """
    pages = documentation_pages()
    if page is None:
        titles = _titles(pages)
        if as_json:
            print_json({"pages": [{"name": name, "title": title} for name, title in titles.items()]})
        else:
            _list(titles)
        return
    name = page.removeprefix("docs/").removesuffix(".md").removesuffix(f"/{_INDEX}")
    if name not in pages:
        close = difflib.get_close_matches(name, pages, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "`hpctrain docs` lists the pages"
        raise InputError(f"no page '{page}'; {hint}")
    text, console = pages[name].read_text(encoding="utf-8"), Console()
    if as_json:
        print_json({"name": name, "text": text})
        return
    if console.is_terminal:
        console.width = min(console.width, WIDTH_MAX)
        console.print(Markdown(text))
    else:
        click.echo(text, nl=False)


def documentation_pages() -> dict[str, Path]:
    """Return the paths of all pages by name, sorted; a folder's README has the folder's name.

    Raises:
        InputError: the installation has no docs folder.
    """
    root = package_data_path("docs")
    paths = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.md")}
    names = {(path.parent if path.name == _INDEX else path).as_posix(): file for path, file in paths.items()}
    return dict(sorted(names.items()))


def _titles(pages: dict[str, Path]) -> dict[str, str]:
    """Return the title of each page by name, except those that a page of their folder lists."""
    titles = {}
    for name, path in pages.items():
        if name.rpartition("/")[0] not in pages:
            with path.open(encoding="utf-8") as lines:
                titles[name] = next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")
    return titles


def _list(titles: dict[str, str]) -> None:
    width = max(map(len, titles))
    for name, title in titles.items():
        table_console().print(f"{name.ljust(width)}  {title}", soft_wrap=True)
