"""What a person sees when something is wrong: one line, the right exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from train_site import RUN, Site, small_topology

from hpctrain.checkpoint import published
from hpctrain.records.history.run_log import last_row_of_each_step, read_events, read_metrics


def refused(site: Site, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a `train` that must not start anything."""
    before = sorted((site.path / "runs").glob("*"))
    done = site.command("train", *arguments)
    assert sorted((site.path / "runs").glob("*")) == before
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_typo_is_told_with_its_line_and_the_nearest_key(site: Site) -> None:
    (site.path / "typo.yaml").write_text(yaml.safe_dump({**RUN, "chekpoint": {"every": 5}}))
    code, said = refused(site, "typo.yaml", "--local", "1")
    assert code == 2
    assert "typo.yaml:" in said
    assert "chekpoint: unknown key; did you mean 'checkpoint'?" in said


@pytest.mark.slow
def test_a_missing_data_folder_is_told_with_what_to_do(site: Site) -> None:
    code, said = refused(site, "run.yaml", "--local", "1", "--set", "data.train=[nowhere]")
    assert code == 2
    assert "nowhere" in said
    assert "hpctrain data prepare" in said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_a_topology_of_other_nodes_is_refused(site: Site) -> None:
    other = small_topology(2)
    nodes = [node.model_copy(update={"id": f"gpu{i}"}) for i, node in enumerate(other.nodes)]
    other.model_copy(update={"nodes": nodes}).write(site.path / "other.json")
    code, said = refused(site, "run.yaml", "--local", "2", "--topology", "other.json")
    assert code == 4
    assert "other.json: it is a topology of gpu0, gpu1; this run has local0, local1" in said


@pytest.mark.slow
def test_a_plan_that_is_not_of_this_run_is_told_whole(site: Site) -> None:
    code, said = refused(
        site,
        "run.yaml",
        "--local",
        "4",
        "--plan",
        "plan4.json",
        "--set",
        "batch.global=9",
        "--set",
        "model.dims.layers=5",
    )
    assert code == 2
    assert "replicas: their sequences add up to 8, the run's batch.global is 9" in said
    assert "stages: they hold 4 blocks, the model has 5" in said


@pytest.mark.slow
def test_a_plan_of_other_nodes_is_refused(site: Site) -> None:
    code, said = refused(site, "run.yaml", "--local", "2", "--plan", "plan4.json")
    assert code == 4
    assert "it uses local2, local3, this run has local0, local1" in said


@pytest.mark.slow
def test_what_cannot_run_yet_is_said_at_once(site: Site) -> None:
    code, said = refused(site, "run.yaml", "--set", "container={image: train.sif}")
    assert code == 2
    assert "container.image: " in said
    code, said = refused(site, "run.yaml", "--set", "model={hf: /some/folder}")
    assert code == 2
    assert "model.hf" in said


@pytest.mark.slow
def test_a_model_that_cannot_fit_ends_the_run_before_it_starts(site: Site) -> None:
    done = site.train(
        "run.yaml",
        "--local",
        "1",
        "--topology",
        "one.json",
        "--set",
        "model={dims: {layers: 48, dim: 4096, heads: 32}}",
    )
    assert done.code == 4
    assert "fit" in done.said
    assert [event.kind for event in done.events][-1] == "failed"
    assert done.rows == []


@pytest.mark.slow
def test_an_error_of_the_model_is_told_and_not_retried(site: Site) -> None:
    done = site.train("run.yaml", "--local", "1", "--topology", "one.json", "--set", "optimizer.lr=1e30")
    assert done.code == 1
    line = re.compile(
        r"step \d+, rank 0 \(local0:cpu0\): (loss is nan|the gradient's norm is \w+); "
        r"first in (layer \d \()?[\w.]+\)?: (forward (in|out)put|gradient of weight) has \d+ of \d+ values not finite; "
        r".*lower optimizer.lr \(1e\+30 now\)",
        re.IGNORECASE,
    )
    assert line.search(done.said), done.said
    assert [event.kind for event in done.events].count("generation_started") == 1


@pytest.mark.slow
@pytest.mark.requires("userns")
def test_a_full_disk_loses_nothing(site: Site, tmp_path: Path) -> None:
    """The run folder lies on a file system that two checkpoints fit on, and not a third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    kept = tmp_path / "kept"
    hpctrain = f"{sys.executable} -m hpctrain"
    script = f"""
        mount -t tmpfs -o size=8m tmpfs {disk} || exit 90
        {hpctrain} train run.yaml --local 1 --topology one.json --set name=full --set steps=32 \\
            --set checkpoint.wait_for_room_s=0 2>{tmp_path}/first
        echo $? >{tmp_path}/code
        cp -a {disk} {kept}
        mount -o remount,size=64m {disk}
        {hpctrain} train --resume full 2>{tmp_path}/second
        echo $? >>{tmp_path}/code
        cp -a {disk}/full-* {tmp_path}/after
    """
    env = {**os.environ, "HPCTRAIN_RUNS": str(disk)}
    unshare = shutil.which("unshare")
    assert unshare is not None
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", script], cwd=site.path, env=env, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert (tmp_path / "code").exists(), done.stderr
    assert (tmp_path / "code").read_text().split() == ["1", "0"], (tmp_path / "first").read_text()
    said = (tmp_path / "first").read_text()
    assert "the last checkpoint could not be written" in said
    assert re.search(r"no room for a checkpoint of step 32: .* are free, .* are needed", said), said
    folder = next(kept.glob("full-*"))
    assert [path.name for path in published.listed(folder / "checkpoints")] == ["step-00000008", "step-00000016"]
    assert not list((folder / "checkpoints").glob(".step-*"))
    skipped = [event for event in read_events(folder / "events.jsonl") if event.kind == "checkpoint_skipped"]
    assert "step 24 not saved" in skipped[0].reason
    after = tmp_path / "after"
    assert [row.step for row in last_row_of_each_step(read_metrics(after / "metrics.jsonl"))] == list(range(1, 33))
    assert published.newest(after / "checkpoints")[0] is not None


@pytest.mark.slow
@pytest.mark.requires("userns")
def test_the_last_step_waits_for_room(site: Site, tmp_path: Path) -> None:
    """The file system becomes larger while the run waits; without that it would give its last step up."""
    disk = tmp_path / "disk"
    disk.mkdir()
    hpctrain = f"{sys.executable} -m hpctrain"
    script = f"""
        mount -t tmpfs -o size=8m tmpfs {disk} || exit 90
        {hpctrain} train run.yaml --local 1 --topology one.json --set name=full --set steps=32 >{tmp_path}/said 2>&1 &
        for _ in $(seq 6000); do
            grep -qs '"kind": "waiting_for_room"' {disk}/full-*/events.jsonl && break
            kill -0 $! || break
            sleep 0.1
        done
        {hpctrain} status full --json >{tmp_path}/status.json
        {hpctrain} status full >{tmp_path}/status
        mount -o remount,size=64m {disk}
        wait $!
        echo $? >{tmp_path}/code
        cp -a {disk}/full-* {tmp_path}/after
    """
    env = {**os.environ, "HPCTRAIN_RUNS": str(disk)}
    unshare = shutil.which("unshare")
    assert unshare is not None
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", script], cwd=site.path, env=env, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert (tmp_path / "code").exists(), done.stderr
    assert (tmp_path / "code").read_text() == "0\n", (tmp_path / "said").read_text()
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["state"] == "running"
    assert re.search(
        r"step 32, the last one: .*no room for a checkpoint of step 32: .* the run waits up to 30 min 0 s",
        told["warning"],
    ), told
    assert "the newest checkpoint is that of step 16" in told["warning"]
    assert re.search(
        r"are free where the run folder lies, and the next checkpoint takes .*: free some", told["warning"]
    )
    assert f"  warning: {told['warning'][:20]}" in (tmp_path / "status").read_text()
    after = tmp_path / "after"
    assert published.newest(after / "checkpoints")[0] is not None
    assert published.listed(after / "checkpoints")[-1].name == "step-00000032"
    kinds = [event.kind for event in read_events(after / "events.jsonl")]
    assert kinds.count("waiting_for_room") == 1
    assert kinds[-1] == "finished"
