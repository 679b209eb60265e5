"""`hpctrain data`: prepare token shards from text, and check that they are unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_count, format_si
from hpctrain.cli.answers import JSON_OPTION, print_json, say
from hpctrain.cli.options.parameters import PATH
from hpctrain.cli.views.console import phases
from hpctrain.corpus.input.skipped import SKIPPED_NAME, read_skipped
from hpctrain.corpus.prepare.options import (
    SAMPLE_BYTES,
    PrepareOptions,
    Progress,
    run_file_lines,
    shared_options,
    sources_of,
)
from hpctrain.corpus.prepare.pool import PeakMemory, peak_memory
from hpctrain.corpus.prepare.prepare import prepare, prepare_sources
from hpctrain.corpus.prepare.shards import check_corpus, corpora_in, size_of
from hpctrain.records.corpus import Cleaning, CorpusIndex, Recipe, read_recipe

_BESIDE_A_RECIPE = ("output", "recipe_file", "workers", "force", "as_json")
"""Parameters of `data prepare` that may be given together with --recipe, because a recipe has no keys for them."""

_SHOWN = 3
"""Most skipped inputs that `data prepare` lists on the terminal."""


@click.group()
def data_command() -> None:
    """Turn text into token shards, and check them."""


@data_command.command("prepare")
@click.argument("inputs", metavar="IN...", nargs=-1, type=PATH)
@click.option("-o", "--output", metavar="DIR", required=True, type=PATH, help="Folder to make.")
@click.option(
    "--recipe",
    "recipe_file",
    metavar="FILE",
    type=PATH,
    help="Make a corpus folder of each source in a recipe.yaml, in place of IN and the options that it has keys for.",
)
@click.option(
    "--tokenizer",
    default="bytes",
    metavar="bytes|FILE|train:N",
    help="A token for each byte; a tokenizer.json; or byte-level BPE trained on this text, of at most N tokens.",
)
@click.option(
    "--sample-bytes",
    type=int,
    default=SAMPLE_BYTES,
    metavar="N",
    help="Text that a tokenizer is trained on, drawn from all of the input.",
)
@click.option("--valid-fraction", default=0.01, metavar="F", help="Share of the text kept aside for validation.")
@click.option("--limit-bytes", type=int, metavar="N", help="Stop after that much text.")
@click.option(
    "--format",
    type=click.Choice(["auto", "text", "jsonl", "parquet", "arrow"]),
    default="auto",
    help="Format of the files. auto: by their names.",
)
@click.option("--text-field", default="text", metavar="NAME", help="Field or column that holds the text.")
@click.option("--skip-bad", is_flag=True, help="Leave out and count records without text, instead of stopping.")
@click.option(
    "--normalize", type=click.Choice(["none", "nfkc"]), default="none", help="Unicode's compatible composed form."
)
@click.option(
    "--whitespace",
    type=click.Choice(["keep", "collapse"]),
    default="keep",
    help="collapse: a run of white space becomes one line end or one blank.",
)
@click.option("--sentences", metavar="LANGUAGE", help="One sentence a line, by spaCy's rules; a language as 'en'.")
@click.option("--workers", type=int, metavar="N", help="Processes. Default: as many as processors and units of work.")
@click.option("--force", is_flag=True, help="Replace a corpus in DIR; drop another command's unfinished work on it.")
@click.option("--json", "as_json", is_flag=True, help="Print the index (of each source of a recipe) on stdout.")
@click.pass_context
def prepare_command(
    context: click.Context,
    inputs: tuple[Path, ...],
    output: Path,
    recipe_file: Path | None,
    workers: int | None,
    force: bool,
    as_json: bool,
    **text: Any,
) -> None:
    """Make the corpus folder DIR from text.

    IN is a file (text, .jsonl, .json, .parquet, .arrow; the first three plain, .gz or .zst), a folder that Hugging Face
    `datasets` saved, or another folder. A folder with .jsonl or .parquet files gives these files, and if it has splits,
    only the training split; any other folder gives all its .md .py .rst .tex .txt files. Text files that are not UTF-8
    are skipped and counted. Equal text and options give an equal folder, byte for byte, with any number of workers.
    After a kill, the same command continues from where it was.
    """
    if recipe_file is not None:
        _check_alone(context, inputs)
        recipe, base = read_recipe(recipe_file), recipe_file.resolve().parent
        options = shared_options(recipe, base, force, workers)
        with phases() as progress:
            indexes = prepare_sources(sources_of(recipe, base), output, options, progress, recipe)
        _answer_recipe(recipe, output, indexes, as_json)
        return
    if not inputs:
        raise click.UsageError("Missing argument 'IN...' (or --recipe FILE)")
    with phases() as progress:
        index = prepare(inputs, output, _options(text, force, workers), progress)
    if as_json:
        click.echo(index.model_dump_json(by_alias=True, indent=1))
    say([*summary(output, index), _memory_line(peak_memory())], as_json)


@data_command.command("check")
@click.argument("folder", metavar="DIR", type=PATH)
@JSON_OPTION
def check_command(folder: Path, as_json: bool) -> None:
    """Compare every file of the corpus folder DIR with its hash. If a recipe made DIR, every corpus in it is
    checked."""
    folders = corpora_in(folder)
    total = sum(size_of(corpus) for corpus in folders)
    with phases() as progress:
        report = _checked(progress, total)
        indexes = [check_corpus(corpus, report) for corpus in folders]
    if as_json:
        rows = [
            {
                "folder": str(corpus),
                "shards": len(index.shards),
                "tokens": index.tokens("train") + index.tokens("valid"),
            }
            for corpus, index in zip(folders, indexes, strict=True)
        ]
        print_json({"corpora": rows})
        return
    for corpus, index in zip(folders, indexes, strict=True):
        tokens = format_count(index.tokens("train") + index.tokens("valid"))
        click.echo(f"{corpus}: {len(index.shards)} shards with {tokens} tokens are what was written")


def summary(folder: Path, index: CorpusIndex) -> list[str]:
    """Return lines about a new corpus: its tokens, and what of the input was skipped or left out."""
    sources = index.sources
    lines = [
        f"{folder}: {format_count(index.tokens('train'))} tokens to train on, "
        f"{format_count(index.tokens('valid'))} for validation, vocabulary {index.vocab_size}, "
        f"from {format_si(sources.text_bytes, 'B')} in {sources.files} files"
    ]
    for count, what in (
        (sources.skipped_not_text, "files that are not UTF-8 text"),
        (sources.skipped_unreadable, "files that cannot be read"),
        (sources.skipped_bad, "records that hold no text or are damaged"),
    ):
        if count:
            lines.append(f"skipped: {count:,} {what}")
    if sources.damaged_files:
        lines.append(f"damaged: {sources.damaged_files:,} files, of which what follows the damage is lost")
    if sources.beside_records:
        lines.append(
            f"left out: {sources.beside_records:,} text files beside records; name them one by one to take them too"
        )
    if sources.other_splits:
        lines.append(f"left out: {sources.other_splits:,} files that are validation or test by their names")
    lines += _listed(folder)
    if not index.tokens("valid"):
        lines.append("nothing was kept aside for validation (--valid-fraction 0, or too little text to split)")
    return lines


def _listed(folder: Path) -> list[str]:
    """Return lines with the first skipped inputs of a corpus, and a last line with the path of the file that lists all
    or many of them; [] if no input was skipped."""
    skipped = read_skipped(folder, _SHOWN)
    if skipped is None:
        return []
    total, listed, first = skipped
    which = "all" if listed == total else f"the first {listed:,} of {total:,}"
    # Names and text of input files may hold anything, also control characters.
    lines = ["".join(c if c.isprintable() else "?" for c in f"  {entry}") for entry in first]
    return [*lines, f"  {folder / SKIPPED_NAME} lists {which}, with file, line and reason"]


def _memory_line(peak: PeakMemory) -> str:
    workers = f", at most {format_si(peak.worker_bytes, 'B')} in each worker" if peak.worker_bytes else ""
    return f"peak memory: {format_si(peak.own_bytes, 'B')} in this process{workers}"


def _options(text: dict[str, Any], force: bool, workers: int | None) -> PrepareOptions:
    """Return the options of one corpus.

    Args:
        text: options of the command line for which a recipe has keys, by parameter name.
        force: replace a corpus that exists.
        workers: number of processes; None: as many as are useful.

    Raises:
        InputError: `sentences` is no language's code.
    """
    cleaning = {key: text.pop(key) for key in ("normalize", "whitespace", "sentences")}
    try:
        clean = Cleaning(**cleaning)
    except ValueError:
        raise InputError(f"--sentences: found {cleaning['sentences']!r}, allowed: a language's code, as en") from None
    return PrepareOptions(**text, clean=clean, force=force, workers=workers)


def _check_alone(context: click.Context, inputs: tuple[Path, ...]) -> None:
    """Check that the command line gives, beside --recipe, no input and no option that belongs into the recipe.

    Raises:
        click.UsageError: the command line gives such an input or option.
    """
    if inputs:
        raise click.UsageError(f"found IN {inputs[0]} beside --recipe; name it as a source in the recipe")
    for parameter in context.command.params:
        name = str(parameter.name)
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _BESIDE_A_RECIPE:
            raise click.UsageError(f"found {parameter.opts[0]} beside --recipe; write it into the recipe")


def _answer_recipe(recipe: Recipe, output: Path, indexes: dict[str, CorpusIndex], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({name: index.to_json() for name, index in indexes.items()}, indent=1))
    for name, index in indexes.items():
        say(summary(output / name, index), as_json)
    lines = run_file_lines(recipe, output)
    say(["to train on it by its weights, write into the run file:", *lines, _memory_line(peak_memory())], as_json)


def _checked(progress: Progress, total: int) -> Any:
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress("checking", done, total)

    return report
