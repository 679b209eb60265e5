"""`hpctrain data`: text files to token shards."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.base.units import format_count, format_si
from hpctrain.cli.progress import phases
from hpctrain.corpus.prepare import Options, prepare
from hpctrain.records.corpus_index import CorpusIndex


@click.group()
def command() -> None:
    """Turn text files into token shards."""


@command.command("prepare")
@click.argument("inputs", metavar="IN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="bytes|FILE|train:N",
    help="A token for each byte; a tokenizer.json; or byte-level BPE trained on this text, of at most N tokens.",
)
@click.option(
    "--valid-fraction",
    default=0.01,
    show_default=True,
    metavar="F",
    help="Share of the text kept aside for validation.",
)
@click.option("--limit-bytes", type=int, metavar="N", help="Stop after that much text.")
@click.option("--force", is_flag=True, help="Replace a corpus that lies in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print the index on stdout.")
def prepare_command(
    inputs: tuple[Path, ...],
    output: Path,
    tokenizer: str,
    valid_fraction: float,
    limit_bytes: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Make the corpus folder DIR of text files.

    IN is a file of any name, or a folder, of which all .md .py .rst .tex .txt files are taken, plain or .gz. Files that
    are not UTF-8 text are skipped and counted. The same text and options give the same folder, byte for byte.
    """
    options = Options(tokenizer, valid_fraction, limit_bytes, force)
    with phases() as progress:
        index = prepare(inputs, output, options, progress)
    if as_json:
        click.echo(index.model_dump_json(by_alias=True, indent=1))
    for line in summary(output, index):
        click.echo(line, err=as_json)


def summary(folder: Path, index: CorpusIndex) -> list[str]:
    """What a person wants to know about a new corpus."""
    sources = index.sources
    lines = [
        f"{folder}: {format_count(index.tokens('train'))} tokens to train on, "
        f"{format_count(index.tokens('valid'))} for validation, vocabulary {index.vocab_size}, "
        f"from {format_si(sources.text_bytes, 'B')} in {sources.files} files"
    ]
    if sources.skipped_not_text or sources.skipped_unreadable:
        lines.append(
            f"skipped: {sources.skipped_not_text} files that are not UTF-8 text, "
            f"{sources.skipped_unreadable} that cannot be read"
        )
    if not index.tokens("valid"):
        lines.append("nothing was kept aside for validation (--valid-fraction 0, or too little text to split)")
    return lines
