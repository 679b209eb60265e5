"""Makes corpus folders from text in two readings of the input, a scan and the encoding, in bounded memory.

Each reading divides the work units among several processes. The result of a unit depends on no other unit. So the
corpus does not depend on the number of processes, nor on how often the command was killed and repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain import __version__
from hpctrain.base.errors import InputError
from hpctrain.base.system.job_share import usable_cpus
from hpctrain.corpus.input.documents import ReadOptions, row_groups
from hpctrain.corpus.input.inputs import TEXT_SUFFIXES, InputFiles, WorkUnit, find_inputs, plan_work_units, unit_bytes
from hpctrain.corpus.input.passages import batches, passage_bytes
from hpctrain.corpus.input.skipped import SkippedInput, SkippedList
from hpctrain.corpus.prepare.encode import CleanTask, EncodeTask, check_cleaning
from hpctrain.corpus.prepare.options import DEFAULTS, CorpusSource, PrepareOptions, Progress, no_progress
from hpctrain.corpus.prepare.partial_folder import files_fingerprint, new_corpus, publish, work_folder
from hpctrain.corpus.prepare.pool import WorkerPool
from hpctrain.corpus.prepare.scan import (
    ScanTask,
    TextSample,
    UnitScan,
    no_bytes,
    read_scan,
    smallest,
    validation_buckets,
)
from hpctrain.corpus.prepare.shards import Part, check_target, dtype_of, file_sha256, write_corpus
from hpctrain.corpus.prepare.tokenizer import Tokenizer, load_tokenizer, train_tokenizer, trained_size
from hpctrain.records.corpus import RECIPE_NAME, CorpusIndex, Recipe, Sources


def prepare(
    inputs: Sequence[Path], folder: Path, options: PrepareOptions = DEFAULTS, progress: Progress = no_progress
) -> CorpusIndex:
    """Make the corpus folder `folder` from files or folders, and return its index. The folder appears only when it is
    complete.

    The same text and options give the same folder, byte for byte, in whatever order the inputs are named. After a kill
    or a StorageError, the same call resumes.

    Raises:
        InputError: an input is missing, holds no text or cannot be used, the folder is not empty, another command is
            at work there or left unfinished work, or an option is wrong.
        HpctrainError: an input changed while it was read, or a worker process was killed.
        StorageError: the folder cannot be written; finished work remains in the folder beside it that ends in
            `.partial`.
    """
    return prepare_sources([CorpusSource("", tuple(inputs), options)], folder, options, progress)[""]


def prepare_sources(
    sources: Sequence[CorpusSource],
    folder: Path,
    options: PrepareOptions,
    progress: Progress = no_progress,
    recipe: Recipe | None = None,
) -> dict[str, CorpusIndex]:
    """Make a corpus folder in `folder` for each source, with one tokenizer for all, trained on all of them. Return
    source name -> index.

    Args:
        options: tokenizer, sample_bytes, workers and force for all sources; every other option comes from the source's
            own options.
        recipe: the recipe that names the sources; a copy is written beside their folders. None: there is no recipe.

    Raises:
        InputError: an input is missing, holds no text or cannot be used, the folder is not empty, another command is
            at work there or left unfinished work, or an option is wrong.
        HpctrainError: an input changed while it was read, or a worker process was killed.
        StorageError: the folder cannot be written; finished work remains in the folder beside it that ends in
            `.partial`.
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
    """Return everything that determines the content of the corpora, as JSON values. Only a command with equal values
    resumes unfinished work."""
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


UNIT_SAMPLE_BYTES = 64 * 1024
"""Least bytes of text that a work unit offers for the sample on which a tokenizer is trained. A large unit offers twice
its share of the sample: the sample is the texts with the smallest ranks (`rank_of`), and a unit may hold more of them
than its share."""

_COUNTS = ("documents", "text_bytes", "skipped_not_text", "skipped_unreadable", "skipped_bad", "damaged_files")
"""Fields of a UnitScan that are summed over the units; the index has fields of the same names."""

_CLEAN_BYTES = 256 * 1024
"""Approximate bytes of the tokenizer's sample that one task cleans."""


@dataclass
class SourceWork:
    """The work on one source: its files, its work units, and the results of its scans."""

    name: str
    """Name of the source's folder within the work folder DIR.partial (`partial_folder`)."""
    source: CorpusSource
    input_files: InputFiles
    units: list[WorkUnit]
    total_bytes: int
    """Size of the source's files on disk, in bytes."""
    scans: list[UnitScan] = field(default_factory=list)
    """Scans of the units in their order: of all units, or of the first ones if the limit of bytes was reached."""
    scan_tasks: list[ScanTask] = field(default_factory=list)
    """The tasks that made `scans`, in the same order."""
    skipped: SkippedList = field(default_factory=SkippedList)
    """The source's files and records that were skipped."""

    @classmethod
    def find(cls, name: str, source: CorpusSource) -> SourceWork:
        """Return the work on a source, with its files found and divided into units; nothing is scanned yet.

        Args:
            name: name of the source's folder within the work folder DIR.partial (`partial_folder`).

        Raises:
            InputError: an input does not exist, or needs a library that is not installed.
        """
        input_files = find_inputs(source.inputs, source.options.format)
        sizes = [file.path.stat().st_size if file.path.exists() else 0 for file in input_files.files]
        size = source.options.unit_bytes or unit_bytes(sum(sizes))
        units = plan_work_units(list(zip(input_files.files, sizes, strict=True)), size, row_groups)
        work = cls(name, source, input_files, units, sum(sizes))
        work.skipped.add(SkippedInput(str(path), "text file beside records") for path in input_files.beside_records)
        work.skipped.add(SkippedInput(str(path), "validation or test by its name") for path in input_files.other_splits)
        return work

    @property
    def reading(self) -> ReadOptions:
        """Options for reading the source's files."""
        options = self.source.options
        size = passage_bytes(self.total_bytes, options.valid_fraction)
        return ReadOptions(size, options.text_field, options.skip_bad)

    @property
    def text_bytes(self) -> int:
        """Bytes of the source's text in the work units scanned so far, without skipped input."""
        return sum(scan.text_bytes for scan in self.scans)

    def counts(self) -> Sources:
        """Return the numbers of the source's files, documents and skipped inputs, for the index of its corpus."""
        pieces = [unit[number] for unit, scan in zip(self.units, self.scans, strict=False) for number in scan.pieces]
        counts = {name: sum(getattr(scan, name) for scan in self.scans) for name in _COUNTS}
        return Sources(
            **counts,
            files=sum(not piece.start for piece in pieces),
            beside_records=len(self.input_files.beside_records),
            other_splits=len(self.input_files.other_splits),
            clean=self.source.options.clean,
        )

    def take(self, scan: UnitScan, task: ScanTask) -> None:
        """Add the scan of the next work unit to the source's scans, and the task that made it to the tasks."""
        count = scan.skipped_not_text + scan.skipped_unreadable + scan.skipped_bad
        self.skipped.add(scan.skipped, count - len(scan.skipped))
        self.scans.append(dataclasses.replace(scan, skipped=[]))
        self.scan_tasks.append(task)

    def read_scans(self) -> Iterator[tuple[NDArray[np.int64], TextSample]]:
        """Yield (bytes of the passages in each hash bucket, sample for the tokenizer) for each scanned unit, from the
        stored scans.

        Raises:
            InputError: a stored scan was removed in the meantime.
        """
        for task in self.scan_tasks:
            scan = read_scan(task.scan_file, task.limit_bytes)
            if scan is None:
                raise InputError(f"{task.scan_file}: was removed while the command ran; run it again")
            yield scan[1], scan[2]

    def valid_buckets(self) -> range:
        """Return the hash buckets of the source whose passages are for validation.

        Raises:
            InputError: a stored scan was removed in the meantime.
        """
        buckets = no_bytes()
        for unit_buckets, _ in self.read_scans():
            buckets += unit_buckets
        return validation_buckets(buckets, self.source.options.valid_fraction)


def scan_all(
    works: Sequence[SourceWork], partial: Path, pool: WorkerPool, sample_bytes: int, progress: Progress
) -> None:
    """Scan the units of each source, up to the source's limit of bytes, and add the scans to `works`.

    Args:
        partial: the work folder DIR.partial, where scans are stored.
        sample_bytes: bytes of text that are wanted to train a tokenizer; 0: none.

    Raises:
        InputError: a source holds no text, a record cannot be used and may not be skipped, or a part of a large text
            file is not text.
        HpctrainError: a worker process was killed.
        StorageError: a scan cannot be stored.
    """
    total = sum(work.total_bytes for work in works)
    report = _counter(progress, "reading", total)
    for work in works:
        folder = partial / work.name
        folder.mkdir(exist_ok=True)
        tasks = [
            ScanTask(unit, work.reading, folder / f"scan-{number:05d}.npz", _offer(work, unit, sample_bytes))
            for number, unit in enumerate(work.units)
        ]
        _scan_until_full(work, tasks, pool, report)
        if not work.text_bytes:
            skipped = work.skipped
            first = f", the first: {skipped.listed[0]}" if skipped.listed else ""
            raise InputError(
                f"IN: {', '.join(map(str, work.source.inputs))}: found no text ({skipped.total} files and records "
                f"skipped{first}); taken from folders are {' '.join(TEXT_SUFFIXES)} .jsonl .parquet, plain, .gz or "
                ".zst, as UTF-8; name other files one by one"
            )
    progress("reading", total, total)  # a limit leaves bytes that were never reported


def clean_sample(works: Sequence[SourceWork], partial: Path, pool: WorkerPool, sample_bytes: int) -> Iterator[str]:
    """Yield about `sample_bytes` of text to train a tokenizer on, cleaned as for encoding. Each source gives text in
    proportion to its bytes of text.

    Args:
        partial: the work folder DIR.partial.

    Raises:
        InputError: a stored scan was removed in the meantime.
        HpctrainError: a worker process was killed.
    """
    whole = sum(work.text_bytes for work in works)
    for work in works:
        share = max(1, sample_bytes * work.text_bytes // whole)
        sample = smallest((unit_sample for _, unit_sample in work.read_scans()), share)
        grouped = batches([text for _, text in sample], len, _CLEAN_BYTES)
        tasks = (CleanTask(tuple(texts), work.source.options.clean) for texts in grouped)
        for texts in pool.run(tasks, lambda count: None):
            yield from texts


def encode_all(
    works: Sequence[SourceWork], partial: Path, target: Path, pool: WorkerPool, tokenizer: Tokenizer, progress: Progress
) -> list[list[Part]]:
    """Encode every work unit of each source to shards in the work folder `partial`. Return, for each source, the units'
    folders with their shards.

    Args:
        partial: the work folder DIR.partial beside the output folder DIR.
        target: the output folder of the whole command, which errors name.

    Raises:
        InputError: the tokenizer cannot encode a text, or a stored scan was removed in the meantime.
        HpctrainError: an input changed after it was scanned, or a worker process was killed.
        StorageError: the shards cannot be written.
    """
    report = _counter(progress, "encoding", sum(work.text_bytes for work in works))
    info = tokenizer.save(partial)
    encoded: list[list[Part]] = []
    for work in works:
        valid_buckets = work.valid_buckets()
        tasks = [
            EncodeTask(
                unit=task.unit,
                reading=task.reading,
                scan=scan,
                valid_buckets=valid_buckets,
                clean=work.source.options.clean,
                tokenizer=str(partial / info.file) if info.file else "bytes",
                tokenizer_sha256=info.sha256,
                dtype=dtype_of(tokenizer.vocab_size),
                shard_tokens=work.source.options.shard_tokens,
                folder=partial / work.name / f"unit-{number:05d}",
                target=target,
            )
            for number, (scan, task) in enumerate(zip(work.scans, work.scan_tasks, strict=True))
            if scan.passages
        ]
        encoded.append([(task.folder, shards) for task, shards in zip(tasks, pool.run(tasks, report), strict=True)])
    return encoded


def _scan_until_full(work: SourceWork, tasks: list[ScanTask], pool: WorkerPool, report: Callable[[int], None]) -> None:
    """Scan a source's units in order and add them to `work`. The unit that exceeds the source's limit of bytes is
    scanned again, up to the limit, and is the last. If even its first passage exceeds the limit and the source has no
    text yet, this one passage is taken."""
    limit = work.source.options.limit_bytes
    results = pool.run(tasks, report)
    for task, scan in zip(tasks, results, strict=True):
        if limit is not None and work.text_bytes + scan.text_bytes > limit:
            room = limit - work.text_bytes
            for limit_bytes in [room] if work.scans else [room, 0]:
                last = dataclasses.replace(task, limit_bytes=limit_bytes)
                scan = last.run(lambda count: None)
                if scan.passages:
                    work.take(scan, last)
                    break
            break
        work.take(scan, task)
    results.close()


def _offer(work: SourceWork, unit: WorkUnit, sample_bytes: int) -> int:
    """Return the bytes of text that a unit offers for the sample on which a tokenizer is trained: 2 · `sample_bytes` ·
    (bytes of the unit / bytes of the source), but at least `UNIT_SAMPLE_BYTES` and at most `sample_bytes`.

    Args:
        sample_bytes: size of the whole sample; 0 if no tokenizer is trained.
    """
    if not sample_bytes:
        return 0
    limit = work.source.options.limit_bytes
    whole = max(1, min(work.total_bytes, limit or work.total_bytes))
    share = 2 * sample_bytes * sum(piece.size_bytes for piece in unit) // whole
    return min(sample_bytes, max(UNIT_SAMPLE_BYTES, share))


def _counter(progress: Progress, phase: str, total: int) -> Callable[[int], None]:
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(phase, min(done, total), total)

    return report
