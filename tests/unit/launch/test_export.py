"""What `hpctrain export` checks before it starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpctrain.base.errors import StorageError
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.launch.export import export

DISK_BYTES = 4 << 20


def test_the_check_of_disk_space_counts_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a disk of 4 MiB, the tokenizer takes 3.5 MiB, and the tensors and their headers get no 1 MiB."""
    (tmp_path / "a.txt").write_text("some words " * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "data")
    run = {
        "steps": 10, "model": {"dims": {"layers": 1, "dim": 8, "heads": 2, "vocab": 257}},
        "data": {"train": [str(tmp_path / "data")], "seq_len": 32}, "batch": {"global": 2},
    }  # fmt: skip
    folder, output = tmp_path / "run", tmp_path / "model"
    folder.mkdir(mode=0o700)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    tokenizer = "{}" + " " * (7 << 19)
    monkeypatch.setattr("hpctrain.launch.export.hf_tokenizer", lambda *_: (tokenizer, {}))
    monkeypatch.setattr(
        "hpctrain.base.system.disk_space.free_bytes",
        lambda made: DISK_BYTES - sum(path.stat().st_size for path in made.iterdir()),
    )
    runner = None  # no process is started
    with pytest.raises(StorageError, match=r"no room for the exported tensors: .* are free, .* are needed"):
        export(folder, output, 0, "float32", 1 << 30, False, runner)  # type: ignore[arg-type]
    assert not output.exists()
