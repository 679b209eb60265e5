"""Every reader of a document gives a value or one of the project's own errors, whatever is in the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_files import check_reader, hostile_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.lab.spec import read_lab_spec
from hpctrain.records.corpus import CorpusIndex, CorpusPart, Recipe, read_recipe
from hpctrain.records.format.document import read_json
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.format.yaml_file import read_yaml
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.ledger import read_bad_nodes, read_successors
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.history.past_runs import read_past_runs
from hpctrain.records.history.provenance import RunProvenance, environment_changes, mixed_versions, read_environments
from hpctrain.records.history.run_log import read_events, read_metrics
from hpctrain.records.history.sweep import Sweep
from hpctrain.records.history.witness import WitnessEntry
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.cluster import read_site
from hpctrain.records.run.run import read_run
from hpctrain.records.topology.topology import Topology

pytestmark = pytest.mark.slow

MANY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
REPOSITORY = Path(__file__).resolve().parents[3]
TOPOLOGY = json.loads((REPOSITORY / "topology" / "lab-4-nodes.json").read_text())
SHARD = {"file": "train-00000.bin", "split": "train", "tokens": 300, "sha256": "0" * 64}
PLAN = {
    "pp": 2, "dp": 1, "tp": 1, "stages": [{"layers": [0, 3]}, {"layers": [3, 6]}],
    "replicas": [{"sequences": 8, "micro_batch": 2, "micro_batches": 4, "devices": [["a:cpu0"], ["b:cpu0"]]}],
    "ranks": ["a:cpu0", "b:cpu0"], "actions": {"0": {"0": ["0F0", "0B0"]}},
    "predicted": {"step_time_s": {"total": 1.0}, "memory_bytes": {"a:cpu0": 1e9}},
    "compression": [{"codec": {"mode": "mixed", "groups": [{"mode": "int4", "layers": "attention"}]}}],
}  # fmt: skip
GENERATION = {
    "number": 1, "attempt": 0, "plan": "generations/plan-000001.0000.json", "reason": "a node was lost",
    "members": [{"node": "n1", "incarnation": "n1-1-2", "addr": "10.0.0.1", "store_port": 4000}],
    "store": {"addr": "10.0.0.1", "port": 4000, "node": "n1"}, "restore": "checkpoints/step-00000010",
}  # fmt: skip
WITNESS = {"number": 1, "round": 2, "proposer": "n1-1-2", "record": GENERATION}
MANIFEST = {
    "step": 10, "generation": 1, "samples": 80, "seed": 0, "run_sha256": "a", "model_sha256": "b", "world_size": 2,
    "loss_scale": {"value": 1024.0}, "files": [{"name": "__0_0.distcp", "size_bytes": 9, "sha256": "0" * 64}],
}  # fmt: skip
INDEX = {
    "vocab_size": 257, "dtype": "uint16", "shards": [SHARD], "sources": {"files": 1, "text_bytes": 300},
    "tokenizer": {"kind": "given", "end_of_text": 256, "file": "tokenizer.json", "sha256": "0" * 64},
}  # fmt: skip
PART = {"text_sha256": "0" * 64, "shards": [SHARD]}
RECIPE = {
    "tokenizer": "train:300", "valid_fraction": 0.1, "clean": {"normalize": "nfkc"},
    "sources": [{"name": "c4", "path": ["c4/*.json.gz"], "weight": 2, "limit_bytes": 1000}],
}  # fmt: skip
RUN = {
    "name": "gpt", "steps": 10, "seed": 1, "model": {"dims": {"layers": 4, "dim": 64, "heads": 4, "vocab": 300}},
    "data": {"train": [{"path": "data", "weight": 1.0}], "valid": {"web": "valid"}, "seq_len": 64},
    "batch": {"global": 8}, "parallel": {"mode": "fixed", "pp": 2}, "compression": {"mode": "topk"},
    "cluster": {"kind": "slurm", "nodes": "2-3", "time": 90, "groups": [], "after": [17], "sbatch": ["--comment=x"]},
    "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}, "recovery": {"spares": 1}, "objective": {"mode": "next_token"},
    "container": {"image": "a.sif", "binds": ["/a:/b"], "env": {"A": "1"}}, "notify": {"url_env": "HOOK"},
}  # fmt: skip
LAB = {
    "nodes": [{"name": "n0", "rate": "100mbit"}, {"name": "n1", "cpus": 2}], "network": "198.18.9.0/24",
    "switches": [{"nodes": "n[0-1]", "uplink_rate": "1gbit"}], "slurm": {"slurmd_timeout_s": 5},
    "partitions": [{"name": "low", "default": True, "nodes": ["n0"], "max_time": 30}],
}  # fmt: skip
SITE = {"profiles": {"here": {"match": "alps*", "cluster": {"kind": "slurm", "partition": "a"}}}}
EVENT = {"kind": "planned", "time_s": 1.0, "attempt": 0, "generation": 1, "node": "n1", "reason": "", "data": {"a": 1}}
METRIC = {
    "step": 1, "generation": 0, "time_s": 1.0, "step_time_s": 0.5, "loss": 2.0, "lr": 0.1, "tokens": 64, "samples": 8,
    "tokens_per_s": 128.0, "bytes_sent": {}, "stage_time_s": [0.1], "micro_batches": [4],
}  # fmt: skip
BAD_NODE = {"node": "n1", "attempt": 0, "time_s": 1.0, "expires_s": 2.0, "reason": "lost"}
SUCCESSOR = {"job_id": "18", "after": "17", "time_s": 1.0, "exclude": ["n1"]}
SOFTWARE = {"hpctrain": "0.1.0", "python": "3.11.7", "torch": "2.7.1", "modules": ["gcc/12"]}
PROVENANCE = {
    "created": "2026-11-20T22:00:00Z", "software": SOFTWARE, "slurm": "24.11.5", "code": {"commit": "a", "dirty": True},
    "image": {"path": "a.sif", "size_bytes": 9, "labels": {"a": "b"}},
    "packages": [{"name": "torch", "version": "2.7.1+cu128", "url": "https://host/a.git", "commit": "0a"}],
}  # fmt: skip
ENVIRONMENT = {
    "attempt": 0, "node": "n1", "time_s": 1.0, "software": SOFTWARE, "driver": "535.1", "gpus": ["NVIDIA A100"],
    "network": {"libibverbs": "1.14"}, "packages": {"torch": "2.7.1"},
}  # fmt: skip
SWEEP = {
    "name": "gpt", "array_limit": 2,
    "runs": [{"name": "gpt-seed0", "folder": "gpt-seed0-20261123T054055Z-dd48", "settings": {"seed": "0"}}],
}  # fmt: skip
PAST = {"time_s": 1.0, "verb": "train", "name": "gpt", "folder": "/runs/gpt"}


def _described_environments(path: Path) -> object:
    lines = read_environments(path.parent)
    for attempt in {line.attempt for line in lines}:
        assert isinstance(environment_changes(lines, attempt) + mixed_versions(lines, attempt), list)
    return lines


DOCUMENTS: dict[str, tuple[str, Any, Callable[[Path], object]]] = {
    "topology": ("topology.json", TOPOLOGY, Topology.read),
    "plan": ("plan.json", PLAN, Plan.read),
    "generation": ("gen-000001.json", GENERATION, Generation.read),
    "witness": ("witness-000001-0000.json", WITNESS, WitnessEntry.read),
    "sweep": ("sweep.json", SWEEP, Sweep.read),
    "manifest": ("manifest.json", MANIFEST, Manifest.read),
    "provenance": ("provenance.json", PROVENANCE, RunProvenance.read),
    "corpus index": ("index.json", INDEX, CorpusIndex.read),
    "corpus part": ("unit.json", PART, CorpusPart.read),
    "recipe of a corpus": ("recipe.json", RECIPE, Recipe.read),
    "recipe": ("recipe.yaml", RECIPE, read_recipe),
    "run": ("run.yaml", RUN, read_run),
    "lab": ("lab.yaml", LAB, read_lab_spec),
    "site": ("site.yaml", SITE, read_site),
}
LINES: dict[str, tuple[str, Any, Callable[[Path], object]]] = {
    "events": ("events.jsonl", EVENT, read_events),
    "metrics": ("metrics.jsonl", METRIC, read_metrics),
    "bad nodes": ("bad_nodes.jsonl", BAD_NODE, lambda path: read_bad_nodes(path.parent)),
    "successors": ("successors.jsonl", SUCCESSOR, lambda path: read_successors(path.parent)),
    "environments": ("environments.jsonl", ENVIRONMENT, _described_environments),
    "attempts": ("attempts.jsonl", {"attempt": 0, "class": "done", "checkpoint_after": None}, read_jsonl),
    "past runs": (
        "hpctrain/history.jsonl", PAST, lambda path: read_past_runs({"XDG_STATE_HOME": str(path.parent.parent)})
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_valid_document_is_read(name: str, tmp_path: Path) -> None:
    file, valid, read = DOCUMENTS[name]
    (tmp_path / file).write_text(json.dumps(valid))
    assert read(tmp_path / file) is not None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_any_document_is_read_or_refused_in_lines_that_name_it(name: str, tmp_path: Path) -> None:
    file, valid, read = DOCUMENTS[name]

    @MANY
    @given(hostile_json(valid))
    def fuzz(data: bytes) -> None:
        (tmp_path / file).write_bytes(data)
        check_reader(read, tmp_path / file)

    fuzz()


@pytest.mark.parametrize("name", LINES)
def test_any_lines_are_read_left_out_or_refused(name: str, tmp_path: Path) -> None:
    file, valid, read = LINES[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(valid) + "\n")
    assert len(read(tmp_path / file)) == 1  # type: ignore[arg-type]

    @settings(MANY, max_examples=40)
    @given(st.lists(hostile_json(valid), max_size=2))
    def fuzz(lines: list[bytes]) -> None:
        (tmp_path / file).write_bytes(b"\n".join(lines))
        check_reader(read, tmp_path / file)

    fuzz()


@pytest.mark.parametrize("name", [*DOCUMENTS, *LINES])
def test_what_is_no_regular_file_or_too_large_is_refused_unread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _, read = (DOCUMENTS | LINES)[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    refused = check_reader(read, path)
    assert refused in (None, [])
    path.unlink()
    with path.open("wb") as sparse:
        sparse.truncate(2**40)
    monkeypatch.setattr(os, "read", lambda *_: pytest.fail("a byte was read"))
    assert check_reader(read, path) in (None, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 1000 + "]" * 1000, "nested too deep; allowed: up to 64 levels"),
        ('{"a": ' * 70 + "1" + "}" * 70, "nested too deep"),
        ('{"pp": ' + "9" * 5000 + "}", "found a number of 5,000 digits; allowed: up to 40"),
        ('{"pp": NaN}', "found NaN; allowed: finite numbers"),
        ('{"pp": -Infinity}', "found -Infinity; allowed: finite numbers"),
        ('{"pp": 1e999}', "found the number 1e999, which is too large"),
        (b"\xff\xfe", "not a text file in UTF-8"),
    ],
)
def test_json_with_bombs_in_it_is_one_line(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError) as error:
        read_json(path)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


YAML_PIECES = st.sampled_from(
    ["!!bool abc", "!!float x", "!!timestamp x", "!!binary é", "!!set {a}", "!!omap [a]", "!!python/name:os.system x",
     "! x", "&a [*a]", "&a x", "*a", "<<: {a: 1}", "? [a]", "{a: {a: {", "- - - -", "'", '"\\x00"', '"\\ud800"',
     "\u2028", "0x" + "f" * 5000, "0o" + "7" * 5000, "9" * 5000, ".nan", "-.inf", "1e999", "%YAML 9.9", "---", "...",
     "|\n  x", "\t", "\x85", "#", "steps: 1", "model:", "data: {train: [a]}", "key: ", ": ", "[", "{", "- "]
)  # fmt: skip


@MANY
@given(st.lists(YAML_PIECES | st.text(max_size=5), max_size=12), st.sampled_from(["", " ", "\n", ": "]))
def test_any_yaml_is_read_or_refused(tmp_path: Path, pieces: list[str], glue: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(glue.join(pieces).encode("utf-8", "surrogatepass"))
    check_reader(read_yaml, path)
    check_reader(read_run, path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('a: 1\nb: !!bool "abc"', ":2: not valid YAML: found the tag !!bool, which is not supported; write the value"),
        ("a: ! x", ":1: not valid YAML: found the tag !,"),
        ("a: " + "9" * 5000, ":1: not valid YAML: found a number of 5,000 digits; allowed: up to 40"),
        ("a: 0x" + "f" * 5000, ":1: not valid YAML: found a number of 5,002 digits; allowed: up to 40"),
        ("a: 1e999", ":1: not valid YAML: found the number 1e999, which is too large; allowed: finite numbers"),
        ("[" * 1000, "nested too deep"),
        ("a: " + "[" * 70 + "]" * 70, ":1: not valid YAML: nested too deep; allowed: up to 64 levels"),
        ("a: &x [1]\nb: [*x, *x]", ":2: not valid YAML: found the alias *x"),
        ("#" * 2_000_000, "has 2000000 bytes or more, expected at most 1048576"),
    ],
)
def test_yaml_with_bombs_in_it_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        read_yaml(path)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


PLANTED = [
    "../../../.bash_profile", "/etc/passwd", "..", ".", "", ".bash_profile", "a/b", "a\\b", "a\0b", "a\nb", "\x1b[31m",
    "x" * 256, "a\u2028b", "a\x85b", "é" * 128,
]  # fmt: skip
NAMES_IN_FILES = {
    "a corpus's shard": ("corpus index", ("shards", 0, "file")),
    "a corpus's tokenizer": ("corpus index", ("tokenizer", "file")),
    "a part's shard": ("corpus part", ("shards", 0, "file")),
    "a checkpoint's file": ("manifest", ("files", 0, "name")),
    "the file of a topology's pairs": ("topology", ("fabric", "matrix", "file")),
    "a recipe's folder": ("recipe of a corpus", ("sources", 0, "name")),
    "a topology's node": ("topology", ("nodes", 0, "id")),
    "a topology's device": ("topology", ("nodes", 0, "devices", 0, "id")),
    "a member of a generation": ("generation", ("members", 0, "node")),
}


def planted(kind: str, place: tuple[str | int, ...], name: str) -> Any:
    """The valid document with the name put in that place."""
    value = json.loads(json.dumps(DOCUMENTS[kind][1]))
    if "matrix" in place:
        value["fabric"]["matrix"] = {"sha256": "0" * 64}
    here = value
    for key in place[:-1]:
        here = here[key]
    here[place[-1]] = name
    return value


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("where", NAMES_IN_FILES)
def test_a_name_that_leads_out_of_its_folder_is_refused_with_its_field(where: str, name: str, tmp_path: Path) -> None:
    kind, place = NAMES_IN_FILES[where]
    file, _, read = DOCUMENTS[kind]
    (tmp_path / file).write_text(json.dumps(planted(kind, place, name)))
    with pytest.raises(FileError) as error:
        read(tmp_path / file)
    (line,) = str(error.value).splitlines()
    assert f"{place[-1]}: found " in line
    assert line.isprintable()


@pytest.mark.parametrize(
    "name", ["../plan.json", "/plan.json", "generations//plan.json", "a/../b", "a/./b", "a\0", "", "a/.b"]
)
@pytest.mark.parametrize("field", ["plan", "restore"])
def test_a_generation_names_files_below_its_run_folder_only(field: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "gen.json").write_text(json.dumps({**GENERATION, field: name}))
    with pytest.raises(FileError, match=rf"gen\.json: {field}: found .*(plain name|U\+0000)"):
        Generation.read(tmp_path / "gen.json")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("model.dims.layers", 10**9, "less than or equal to 4096"),
        ("model.dims.dim", 10**9, "less than or equal to 4194304"),
        ("model.dims.heads", 10**9, "less than or equal to 65536"),
        ("model.dims.vocab", 10**9, "less than or equal to 16777216"),
        ("data.seq_len", 10**9, "less than or equal to 16777216"),
        ("batch.global", 10**12, "less than or equal to 262144"),
        ("steps", 10**12, "less than or equal to 1000000000"),
        ("cluster.nodes", 10**8, "allowed: up to 100000 nodes"),
        ("cluster.nodes", "1-100000000", "allowed: up to 100000 nodes"),
        ("cluster.nodes", "²", "allowed: a number"),
        ("parallel.pp", 10**9, "less than or equal to 1048576"),
        ("optimizer.lr", ".inf", "finite number"),
        ("optimizer.eps", ".nan", "finite number"),
        ("data.train", ["a\0b"], "a path may not hold the character U+0000"),
        ("data.train", ["x" * 300], "a path has at most 4095 bytes, and 255 in each name"),
    ],
)
def test_a_run_that_asks_for_too_much_is_one_line_with_what_is_allowed(
    key: str, value: Any, allowed: str, tmp_path: Path
) -> None:
    run = json.loads(json.dumps(RUN))
    here = run
    *above, last = key.split(".")
    for part in above:
        here = here[part]
    here[last] = value
    text = json.dumps(run).replace('".inf"', ".inf").replace('".nan"', ".nan")
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(FileError) as error:
        read_run(tmp_path / "run.yaml")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}/run.yaml:1: {key}")
    assert "found " in line
    assert allowed in line


def test_a_lab_with_nodes_beyond_number_is_refused_before_they_are_made(tmp_path: Path) -> None:
    switches = [{"nodes": "node[0-99999999]"}]
    (tmp_path / "lab.yaml").write_text(json.dumps({"nodes": 2, "switches": switches}))
    with pytest.raises(FileError, match=r"switches.*more than 100000 names"):
        read_lab_spec(tmp_path / "lab.yaml")


def test_of_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({**INDEX, "shards": [{}] * 500}))
    with pytest.raises(FileError) as error:
        CorpusIndex.read(tmp_path / "index.json")
    lines = str(error.value).splitlines()
    assert len(lines) == 51
    assert lines[-1].endswith("mistakes more")
