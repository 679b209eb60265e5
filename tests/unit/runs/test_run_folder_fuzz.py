"""Whatever bytes lie in the small files of a run folder: looking at it ends with an answer or with one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from run_folders import submitted_run

from hpctrain.base.errors import InputError
from hpctrain.jobs.dependencies import DEPENDENT_RUNS_FILE, refresh_dependent_runs
from hpctrain.runs.folder import RunFolder, is_locked, lock_holder, lock_run_folder
from hpctrain.runs.locate import find_run, job_id, open_jobs, run_of_job
from hpctrain.slurm.commands import Slurm

pytestmark = pytest.mark.slow

LOOKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "newest job": ("job_id", job_id),
    "by a job": ("job_id", lambda folder: run_of_job("7", {"HPCTRAIN_RUNS": str(folder.parent)}, folder)),
    "by a name": ("job_id", lambda folder: find_run("gpt", {"HPCTRAIN_RUNS": str(folder.parent)}, folder)),
    "open jobs": ("successors.jsonl", open_jobs),
    "attempts": ("attempts.jsonl", lambda folder: RunFolder(folder).attempts()),
    "followers": (DEPENDENT_RUNS_FILE, lambda folder: refresh_dependent_runs(folder, Slurm(FakeSlurm()), {})),
    "lock": ("run.lock", lambda folder: (is_locked(folder), lock_holder(folder), lock_run_folder(folder).close())),
}
"""What is asked -> the file that answers it, and the question."""

line = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(str.encode),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["attempt", "job_id", "after", "time_s", "x"]), inner, max_size=4)
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return submitted_run(tmp_path_factory.mktemp("fuzz"), "7")


@pytest.mark.parametrize("question", LOOKS)
@settings(max_examples=300)
@given(lines=st.lists(line, max_size=4))
@example(lines=[b"5", b"[]", b"null"])
@example(lines=["\u00b2 host".encode()])
@example(lines=[b"a\0b", b"/" + b"x" * 300])
@example(lines=[b"9" * 500 + b" host"])
@example(lines=[b"["] * 3)
def test_any_bytes_end_with_an_answer_or_an_error_of_the_input(question: str, lines: list[bytes], folder: Path) -> None:
    name, ask = LOOKS[question]
    for other in {file for file, _ in LOOKS.values()}:
        (folder / other).unlink(missing_ok=True)
    (folder / "job_id").write_text("7\n")
    (folder / name).write_bytes(b"\n".join(lines))
    said = _error_of(ask, folder)
    assert said is None or str(folder / name) in said


def _error_of(ask: Callable[[Path], object], folder: Path) -> str | None:
    try:
        ask(folder)
    except InputError as error:
        return str(error)
    return None
