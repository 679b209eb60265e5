"""Hooks of MkDocs (mkdocs.yml): pages from outside docs/, links that lead there, and the tables of the reference.

A page of the repository reads the same in git and on the site. So its links are paths of the repository, and the hooks
rewrite them for the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from tools.docs_site.navigation import FROM_OUTSIDE, ROOT, page_of, source_of, with_pages
from tools.docs_site.reference import with_reference

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_TEXT_ABOVE_LIST = re.compile(r"^(?! {4}|[-*|>#]|\d+\. )(\S.*)\n(?=- |1\. )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each folder in the navigation by its pages, name the anchors of headings as viewers of git do, and return
    the configuration."""
    config.nav = with_pages(config.nav, Path(config.docs_dir))
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and return all files."""
    for page, source in FROM_OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text with links of the site, the generated parts of the reference, and an empty line above each
    list: Python-Markdown needs one, viewers of git do not."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    linked = _LINK.sub(lambda link: _site_link(link, page.file.src_uri), markdown)
    return with_reference(_TEXT_ABOVE_LIST.sub(r"\1\n\n", linked))


def _site_link(link: re.Match[str], page: str) -> str:
    """Return a link of the repository as a link of the site. A link to code becomes its text, because the site has no
    code."""
    image, text, target, anchor = link.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), target))
    path = f"{path}/README.md" if (ROOT / path).is_dir() else path
    there = page_of(path)
    if there is None:
        return str(text) if (ROOT / path).exists() else link[0]
    return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor or ''})"
