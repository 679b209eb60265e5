"""Makes corpus folders from text in two readings, a scan and the encoding, in bounded memory.

Both readings go over work units with several processes. The result of a unit depends on no other unit. So the corpus
does not depend on the number of processes, nor on how often the command was killed and repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.corpus.prepare.encode import check_cleaning
from hpctrain.corpus.prepare.options import DEFAULTS, CorpusSource, PrepareOptions, Progress, no_progress
from hpctrain.corpus.prepare.partial_folder import files_fingerprint, new_corpus, publish, work_folder
from hpctrain.corpus.prepare.pool import WorkerPool, usable_cpus
from hpctrain.corpus.prepare.shards import check_target, file_sha256, write_corpus
from hpctrain.corpus.prepare.source_work import SourceWork, clean_sample, encode_all, scan_all
from hpctrain.corpus.prepare.tokenizer import load_tokenizer, train_tokenizer, trained_size
from hpctrain.records.corpus import RECIPE_NAME, CorpusIndex, Recipe


def prepare(
    inputs: Sequence[Path], folder: Path, options: PrepareOptions = DEFAULTS, progress: Progress = no_progress
) -> CorpusIndex:
    """Make a corpus folder from files or folders. The folder appears only when it is complete.

    The same text and options give the same folder, byte for byte, in whatever order the inputs are named. After a kill
    or an error the same call resumes.

    Raises:
        InputError: an input is missing or holds no text, the folder is not empty, or an option is wrong.
        StorageError: the folder cannot be written; finished work remains in the folder beside it.
    """
    return prepare_sources([CorpusSource("", tuple(inputs), options)], folder, options, progress)[""]


def prepare_sources(
    sources: Sequence[CorpusSource],
    folder: Path,
    options: PrepareOptions,
    progress: Progress = no_progress,
    recipe: Recipe | None = None,
) -> dict[str, CorpusIndex]:
    """Make a corpus folder for each source, with one tokenizer for all, trained on all of them.

    Args:
        options: of these, only tokenizer, sample_bytes, workers and force are used; each source has the others.
        recipe: the recipe that names the sources; a copy is written beside their folders.

    Raises:
        InputError, StorageError: see `prepare`.
    """
    _check(sources, options)
    check_target(folder, options.force)
    folder = folder.resolve()
    size = trained_size(options.tokenizer)
    given = load_tokenizer(options.tokenizer) if size is None else None
    works = [SourceWork.find(f"source-{number}", source) for number, source in enumerate(sources)]
    workers = options.workers or max(1, min(usable_cpus(), sum(len(work.units) for work in works)))
    sampled = 0 if given else options.sample_bytes
    with work_folder(folder, _command(works, options, recipe), options.force) as partial, WorkerPool(workers) as pool:
        scan_all(works, partial, pool, sampled, progress)
        tokenizer = given or train_tokenizer(size or 0, clean_sample(works, partial, pool, sampled))
        shards = encode_all(works, partial, folder, pool, tokenizer, progress)
        corpus = new_corpus(partial)
        indexes = {}
        for work, parts in zip(works, shards, strict=True):
            name, shard_tokens = work.source.name, work.source.options.shard_tokens
            indexes[name] = write_corpus(corpus / name, parts, tokenizer, work.counts(), shard_tokens)
            work.skipped.write(corpus / name)
        if recipe is not None:
            recipe.write(corpus / RECIPE_NAME)
        publish(partial, folder)
    return indexes


def _check(sources: Sequence[CorpusSource], options: PrepareOptions) -> None:
    for source_options in (source.options for source in sources):
        if not 0 <= source_options.valid_fraction < 1:
            raise InputError(f"--valid-fraction: found {source_options.valid_fraction:g}, allowed: from 0 to below 1")
        if source_options.limit_bytes is not None and source_options.limit_bytes < 1:
            raise InputError(f"--limit-bytes: found {source_options.limit_bytes}, allowed: 1 or more")
        check_cleaning(source_options.clean)
    for name, value in (("--workers", options.workers), ("--sample-bytes", options.sample_bytes)):
        if value is not None and value < 1:
            raise InputError(f"{name}: found {value}, allowed: 1 or more")


def _command(works: Sequence[SourceWork], options: PrepareOptions, recipe: Recipe | None) -> dict[str, Any]:
    """Return everything that determines the result, as JSON values: only a command with equal values resumes unfinished
    work."""
    libraries = ["tokenizers", *(["spacy"] if any(work.source.options.clean.sentences for work in works) else [])]
    return {
        "hpctrain": __version__,
        "libraries": {name: version(name) for name in libraries},
        "tokenizer": options.tokenizer,
        "tokenizer file": file_sha256(Path(options.tokenizer)) if Path(options.tokenizer).is_file() else None,
        "sample_bytes": options.sample_bytes,
        "sources": [work.source.name for work in works],
        "input files": [files_fingerprint(work.input_files.files) for work in works],
        **{
            key: [getattr(work.source.options, key) for work in works]
            for key in ("valid_fraction", "limit_bytes", "shard_tokens", "text_field", "skip_bad", "unit_bytes")
        },
        "clean": [work.source.options.clean.to_json() for work in works],
        "recipe": recipe.to_json() if recipe else None,
    }
