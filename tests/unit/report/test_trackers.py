"""Runs in trackers, read back with each tool's own reader."""

from __future__ import annotations

import fcntl
import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.base.module_argv import program
from hpctrain.cli.main import cli
from hpctrain.records.history.rank_log import RANK_LOG, RankRow
from hpctrain.records.history.run_log import MetricRow, read_events
from hpctrain.runs.folder import LOCK_FILE

pytestmark = pytest.mark.slow


def ranks(step: int) -> str:
    return "".join(
        json.dumps(
            RankRow(
                step=step, steps=1, generation=0, rank=rank, device=f"node{rank // 2}:cuda{rank % 2}", stages=[0],
                forward_s=[0.25], backward_s=[0.5 + rank], wait_pp_s=0.01, wait_dp_s=0.02, wait_world_s=0.03,
                wait_device_s=0.0, hidden_dp_s=0.0, memory_bytes=2e9,
            ).to_json()
        )
        + "\n"
        for rank in range(4)
    )  # fmt: skip


@pytest.fixture
def run(finished_run: Any) -> Path:
    (finished_run.path / RANK_LOG).write_text(ranks(10))
    return Path(finished_run.path)


def track(run: Path, *words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["track", str(run), *words])
    assert result.exit_code == code, result.output
    return result


def rows_of(run: Path) -> list[MetricRow]:
    return [MetricRow.from_json(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def add_row(run: Path, loss: float) -> MetricRow:
    last = rows_of(run)[-1]
    new = last.model_copy(update={"step": last.step + 1, "time_s": last.time_s + 1, "loss": loss})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(new.to_json()) + "\n")
    return new


def tensorboard_losses(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    return [(each.step, each.value) for each in events.Scalars("loss")]


def test_tensorboard_has_every_row_once_though_the_command_is_repeated(run: Path, tmp_path: Path) -> None:
    track(run, "--to", "tensorboard", "-o", str(tmp_path / "out"))
    track(run, "--to", "tensorboard", "-o", str(tmp_path / "out"))
    folder = tmp_path / "out" / "tensorboard" / run.name
    before = rows_of(run)
    assert tensorboard_losses(folder) == [(row.step, pytest.approx(row.loss)) for row in before]
    new = add_row(run, 0.125)
    track(run, "--to", "tensorboard", "-o", str(tmp_path / "out"))
    assert tensorboard_losses(folder)[len(before) :] == [(new.step, 0.125)]
    track(run, "--to", "tensorboard", "-o", str(tmp_path / "other"))
    assert len(tensorboard_losses(tmp_path / "other" / "tensorboard" / run.name)) == len(before) + 1


def test_mlflow_has_settings_metrics_and_state_of_one_run(run: Path) -> None:
    track(run, "--to", "mlflow")
    new = add_row(run, 0.125)
    track(run, "--to", "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run / "tracking" / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("hpctrain").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["hpctrain.run"] == run.name
    assert found.data.params["batch.global"]
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == sorted((row.step, row.loss) for row in rows_of(run))
    assert client.get_metric_history(found.info.run_id, "bytes_sent.dp")[-1].step == new.step


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log as LevelDB writes it, in blocks of 32 KiB (log_format.md of LevelDB), with
    W&B's protocol buffers in it. The package has no reader of its own any more, besides one that sends to a server."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # the rest of a block that holds no header
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb_has_an_offline_run_with_steps_that_come_again(run: Path) -> None:
    track(run, "--to", "wandb")
    (path,) = (run / "tracking" / "wandb").glob("wandb/offline-run-*/*.wandb")
    losses, ids, codes = [], [], []
    for record in wandb_records(path):
        ids += [record.run.run_id] if record.run.run_id else []
        codes += [record.exit.exit_code] if record.HasField("exit") else []
        figures = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        losses += [(figures["step"], figures["loss"])] if "loss" in figures else []
    assert set(ids) == {run.name}
    assert codes == [0]
    assert losses == [(row.step, row.loss) for row in rows_of(run)]
    assert len({step for step, _ in losses}) < len(losses), "steps come again after the fault"


def test_openmetrics_has_a_file_for_each_node_until_the_run_is_over(run_folder: Any, make: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    run, lock = run_folder.path, run_folder.path / LOCK_FILE
    events, rows = make.history()
    run_folder.write([each for each in events if each.kind != "finished"], rows)
    (run / RANK_LOG).write_text(ranks(10))
    output = run / "tracking" / "openmetrics"
    lock.touch(mode=0o600)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as the process that supervises the run
        process = subprocess.Popen([*program("hpctrain"), "track", str(run), "--to", "openmetrics", "--follow"])
        deadline = time.monotonic() + 120
        while not (output / "node1.prom").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        samples = {
            (file.name, sample.name, sample.labels.get("rank")): sample.value
            for file in output.glob("*.prom")
            for family in text_string_to_metric_families(file.read_text())
            for sample in family.samples
        }
        assert samples["node0.prom", "hpctrain_loss", None] == rows[-1].loss
        assert ("node1.prom", "hpctrain_loss", None) not in samples
        assert samples["node1.prom", "hpctrain_rank_compute_s", "3"] == 3.75
        assert ("node0.prom", "hpctrain_rank_compute_s", "3") not in samples
        run_folder.write([each for each in events if each.kind == "finished"], [])
    assert process.wait(120) == 0
    assert list(output.iterdir()) == []


def test_a_stopped_process_has_written_what_was_there(run_folder: Any, make: Any) -> None:
    run, lock = run_folder.path, run_folder.path / LOCK_FILE
    events, rows = make.history()
    run_folder.write([each for each in events if each.kind != "finished"], rows[:-1])
    lock.touch(mode=0o600)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen([*program("hpctrain"), "track", str(run), "--to", "tensorboard", "--follow"])
        deadline = time.monotonic() + 120
        while not (run / "tracking" / "tensorboard.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run_folder.write([], rows[-1:])
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert len(tensorboard_losses(run / "tracking" / "tensorboard" / run.name)) == len(rows)


def test_a_tracker_that_fails_is_one_line_and_the_others_get_everything(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tensorboard").write_text("a file where the folder should be")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if the package were missing
    monkeypatch.setenv("HPCTRAIN_ATTEMPT", "0")
    words = ("--to", "tensorboard", "--to", "wandb", "--to", "mlflow", "-o", str(tmp_path / "out"))
    result = track(run, *words, code=1)
    lines = result.stderr.splitlines()
    assert [line.split(":")[1] for line in lines] == [" tracker tensorboard", " tracker wandb"]
    assert "pip install " in lines[1]
    events = [each for each in read_events(run / "events.jsonl") if each.kind == "tracker_failed"]
    assert [each.data["tracker"] for each in events] == ["tensorboard", "wandb"]
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "out" / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("hpctrain").experiment_id])
    assert len(client.get_metric_history(found.info.run_id, "loss")) == len(rows_of(run))


def test_a_full_disk_is_one_line(run: Path, small_files: Any) -> None:
    output = run / "tracking" / "tensorboard"
    with small_files(200):
        result = track(run, "--to", "tensorboard", code=1)
    assert result.stderr.splitlines() == [f"hpctrain: tracker tensorboard: {output}: File too large"]
    assert not (run / "tracking" / "tensorboard.json").exists()


def test_a_run_that_names_no_tracker_asks_for_one(run: Path) -> None:
    result = CliRunner().invoke(cli, ["track", str(run)])
    assert str(result.exception) == (
        f"{run.name}: its run file names no tracker (tracking.trackers); give one with --to"
    )
