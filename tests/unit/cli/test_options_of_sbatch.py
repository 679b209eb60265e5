"""Slurm's options `-p -A -q -N -t -C -w -x -J -G --gpus-per-node` on every command that submits a job."""

from __future__ import annotations

import json
import re

import pytest
from run_folders import RUN, event, submitted_run

from hpctrain.base.package_data import package_data_path
from hpctrain.cli.options.slurm_options import GpuCount, SlurmOptions
from hpctrain.launch.preflight.prepare import PreparedRun
from hpctrain.launch.probe import ProbeJob, srun_command
from hpctrain.records.history.selfcheck import SelfcheckReport
from hpctrain.records.run.run import Run, read_run
from hpctrain.records.topology.topology import Topology
from hpctrain.slurm.commands import Slurm

ALWAYS = {"--exclusive", "--mem=0", "--requeue", "--no-kill", "--open-mode=append", "--signal=USR2@120"}
"""Directives of every job script of the tests; `--output` names the folder."""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_file(monkeypatch, tmp_path):
    """A run file with a partition, two nodes and an hour, whose data is not looked at."""

    def prepare(given, runner, queued=False):
        run = given.run()
        return PreparedRun(run, run.spec().model_copy(update={"vocab": 256}), [], None, None)

    monkeypatch.setattr("hpctrain.launch.queueing.prepare", prepare)
    path = tmp_path / "run.yaml"
    cluster = {"kind": "slurm", "nodes": "2", "partition": "low", "time": "1:00:00", "exclusive": True}
    path.write_text(json.dumps({**RUN, "cluster": cluster}))
    return path


@pytest.fixture
def script(fake, runs, hpctrain, run_file):
    """A function that returns the directives of a dry run with these words, without those of every job."""

    def directives(*words: str) -> set[str]:
        result = hpctrain("submit", str(run_file), "--dry-run", "--json", *words)
        assert result.exit_code == 0, result.exception or result.output
        lines = json.loads(result.stdout)["script"].splitlines()
        found = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
        assert found >= ALWAYS
        return {item for item in found - ALWAYS if not item.startswith("--output=")}

    return directives


FILE = {"--job-name=gpt", "--nodes=2", "--partition=low", "--time=1:00:00", "--gpus-per-node=4"}
"""Directives of the run file alone: all GPUs of the nodes are asked for."""


@pytest.mark.parametrize(
    ("words", "gone", "new"),
    [
        ([], set(), set()),
        (["-p", "high"], {"--partition=low"}, {"--partition=high"}),
        (["-A", "my project"], set(), {"--account='my project'"}),
        (["-q", "long"], set(), {"--qos=long"}),
        (["-N", "3"], {"--nodes=2"}, {"--nodes=3"}),
        (["-N2-3"], {"--nodes=2"}, {"--nodes=2-3"}),
        (["-t", "2:00:00"], {"--time=1:00:00"}, {"--time=2:00:00"}),
        (["-t", "30"], {"--time=1:00:00"}, {"--time=30"}),
        (["-w", "gpu[1-2]"], set(), {"--nodelist='gpu[1-2]'"}),
        (["-x", "gpu3"], set(), {"--exclude=gpu3"}),
        (["-J", "trial"], {"--job-name=gpt"}, {"--job-name=trial"}),
        (["-G", "2"], {"--nodes=2", "--gpus-per-node=4"}, {"--nodes=1", "--gpus-per-node=2"}),
        (["-G", "12"], {"--nodes=2"}, {"--nodes=3"}),
        (["-G", "4", "-N", "2"], {"--gpus-per-node=4"}, {"--gpus-per-node=2"}),
        (["-G", "a100:6", "-N3"], {"--nodes=2", "--gpus-per-node=4"}, {"--nodes=3", "--gpus-per-node=a100:2"}),
        (["-G", "3", "--gpus-per-node", "1"], {"--nodes=2", "--gpus-per-node=4"}, {"--nodes=3", "--gpus-per-node=1"}),
        (["--gpus-per-node", "a100:1"], {"--gpus-per-node=4"}, {"--gpus-per-node=a100:1"}),
        (["--set", "cluster.time=9:00", "-t", "8:00:00"], {"--time=1:00:00"}, {"--time=8:00:00"}),
    ],
)  # fmt: skip
def test_an_option_counts_before_the_run_file_and_changes_nothing_else(script, words, gone, new):
    assert gone <= FILE
    assert script(*words) == (FILE - gone) | new


def test_all_of_them_together(script):
    words = "-p high -A physics -q long -N 2 -t 2-00 -w gpu[1-2] -x gpu3 -J trial -G 4"
    assert script(*words.split()) == {
        "--partition=high", "--account=physics", "--qos=long", "--nodes=2", "--time=2-00", "--nodelist='gpu[1-2]'",
        "--exclude=gpu3", "--job-name=trial", "--gpus-per-node=2",
    }  # fmt: skip


def test_nodes_of_a_list_are_counted_where_the_run_file_names_no_number(script, run_file):
    run_file.write_text(json.dumps({**RUN, "cluster": {"kind": "slurm", "partition": "low", "time": 60}}))
    assert "--nodes=3" in script("-w", "gpu[1-3]")


def test_a_job_gets_other_nodes_besides_those_that_it_names(script, hpctrain, run_file):
    assert {"--nodes=2", "--nodelist=gpu1"} <= script("-w", "gpu1")
    result = hpctrain("submit", str(run_file), "--dry-run", "-w", "gpu1")
    assert "start it at once, not counting the time until the nodes of cluster.nodelist are free" in result.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-t", "t.json"], "-t/--time: found 't.json'; a file is given as --topology t.json"),
        (["-t", "out/four"], "-t/--time: found 'out/four'; a file is given as --topology out/four"),
        (["-p", "plan.json"], "-p/--partition: found 'plan.json'; a file is given as --plan plan.json"),
        (["-t", "soon"], "-t/--time: found 'soon'; allowed: minutes, minutes:seconds"),
        (["-t", "1:00"], "cluster.time: found 00:01:00; allowed: more than"),
        (["-N", "0"], "-N/--nodes: found '0'; at least one node"),
        (["-N", "four"], "-N/--nodes: found 'four'; allowed: a number"),
        (["-C", "a b"], "-C/--constraint: found 'a b'"),
        (["-w", "gpu[1"], "-w/--nodelist: found 'gpu[1'"),
        (["-w", ""], "-w/--nodelist: found ''; it names no node"),
        (["-w", "gpu[1-3]"], "nodes is 2; name fewer, or raise nodes (with -w/--nodelist)"),
        (["-w", "gpu1", "-x", "gpu[1-2]"], "nodelist and exclude both name gpu1"),
        (["-C", "a100", "--set", "cluster.groups=[{constraint: a, nodes: 2}]"], "each group (with -C/--constraint)"),
        (["-J", "a/b"], "(given by -J/--job-name)"),
        (["-J", "a/b", "--set", "name=c/d"], "found 'a/b'"),
        (["-G", "eight"], "-G/--gpus: found 'eight'; allowed: a number of GPUs, as 8 or a100:8"),
        (["-G", "0"], "-G/--gpus: found 0; allowed: at least 1 GPU"),
        (["-G", "8", "-N", "3"], "-G/--gpus: 8 GPUs do not divide over 3 nodes; fitting: 6 or 9"),
        (["-G", "1", "-N", "3"], "-G/--gpus: 1 GPUs do not divide over 3 nodes; fitting: 3"),
        (["-G", "5", "--gpus-per-node", "4"], "-G/--gpus: 5 GPUs do not divide into nodes of 4 GPUs; fitting: 4 or 8"),
        (["-G", "8", "-N3", "--gpus-per-node", "4"], "-G/--gpus: found 8; 3 nodes of 4 GPUs have 12"),
        (["-G", "8", "-N", "2-3"], "-G/--gpus: cluster.nodes is 2-3; give one number of nodes"),
        (["-G", "13"], "-G/--gpus: 13 GPUs, the same number on each node, fit no number of nodes: a node has up to 4"),
        (["-G", "4", "--set", "cluster.device=cpu"], "-G/--gpus: cluster.device is cpu"),
        (["--gpus-per-node", "0"], "found 0; input should be greater than or equal to 1 (given by --gpus-per-node)"),
        (["-p", "nosuch"], "cluster.partition: "),
        (["-p", "typo", "-G", "1"], "-G/--gpus: cluster.partition: found 'typo'; allowed: low, high"),
        (["-G", "v100:1"], "-G/--gpus: cluster.gpu_type: found 'v100'; "),
        (["-C", "foo", "-G", "1"], "-G/--gpus: cluster.constraint: found 'foo' for 1 nodes; 0 of the 3 nodes"),
        (["-x", "gpu[1-3]", "-G", "1"], "-G/--gpus: no node has GPUs (partition low, exclude gpu[1-3]); choose others"),
        (["-G", "a100:4", "--gpus-per-node", "v100:2"], "-G/--gpus and --gpus-per-node: found types a100 and v100; "),
        (["--local", "-p", "gpu"], "-p/--partition: only for a Slurm job; leave out --local, or leave out -p"),
        (["--own-job", "-p", "low", "-N2"], "--own-job: this job runs already; leave out -p/--partition, -N/--nodes"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_that_names_the_option(fake, runs, hpctrain, run_file, words, text):
    result = hpctrain("submit", str(run_file), *words)
    assert text in str(result.exception)
    assert len(str(result.exception).splitlines()) == 1
    assert result.exception.exit_code in (2, 4)
    assert not runs.exists()


def test_options_of_a_job_are_refused_for_a_run_that_is_none(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.queueing.submit_local", lambda *args: "4711")
    fake.installed = False
    local = ("submit", str(run_file), "--set", "cluster.kind=local")
    assert "-p/--partition, -t/--time: only for a Slurm job" in str(hpctrain(*local, "-p", "x", "-t", "9").exception)
    assert hpctrain(*local, "-N", "1", "-J", "mine").exit_code == 0
    (folder,) = runs.iterdir()
    assert (read_run(folder / "run.yaml").cluster.nodes, read_run(folder / "run.yaml").name) == ("1", "mine")


def test_options_that_an_allocation_leaves_no_choice_of_are_named(fake, runs, hpctrain, run_file, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    result = hpctrain("submit", str(run_file), "--dry-run", "-p", "high", "-J", "mine")
    assert "-p/--partition: not used, as the allocation is there already" in result.stdout


def test_a_run_is_submitted_again_with_other_options(fake, runs, hpctrain, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "hpctrain.cli.commands.resubmit.submit_job", lambda folder, run, *_: asked.append(run.cluster) or "99"
    )
    job = fake.submit("--nodes=2")
    fake.finish(job, code=1)
    folder = submitted_run(runs, job, event("failed", reason="1 of the nodes are left (gpu3)"))
    refused = hpctrain("resubmit", "gpt", "-J", "other")
    assert "-J/--job-name: a run that goes on keeps it: it names the run folder" in str(refused.exception)
    result = hpctrain("resubmit", "gpt", "-p", "high", "-t", "3:00:00", "-G", "6", "-N3", "-x", "gpu7")
    assert result.exit_code == 0, result.exception
    (cluster,) = asked
    assert (cluster.partition, cluster.time, cluster.nodes, cluster.devices_per_node, cluster.exclude) == (
        "high", "3:00:00", "3", 2, "gpu7",
    )  # fmt: skip
    assert read_run(folder / "run.yaml").cluster.time == "3:00:00"


def test_gpus_of_a_partition_without_any(fake, runs, hpctrain, run_file, monkeypatch):
    lines = fake._node_lines()
    monkeypatch.setattr(fake, "_node_lines", lambda: [re.sub(r"Gres=\S+", "Gres=(null)", line) for line in lines])
    result = hpctrain("submit", str(run_file), "-G", "1")
    assert str(result.exception) == "-G/--gpus: no node has GPUs (partition low); choose others, or leave out -G/--gpus"


def test_without_an_answer_of_slurm_the_run_file_has_the_number_of_nodes(fake):
    fake.away = True
    run = Run.from_json({**RUN, "cluster": {"kind": "slurm", "nodes": "2"}})
    assert [str(key) for key in SlurmOptions(gpus=GpuCount(4)).gpu_overrides(run, Slurm(fake), {})] == [
        "cluster.devices_per_node=2"
    ]


@pytest.fixture
def node_jobs(monkeypatch, tmp_path):
    """The jobs of `probe` and `selfcheck`, which are not started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked: list[ProbeJob] = []

    def probe(job, *_args):
        asked.append(job)
        return Topology.read(package_data_path("topology", "laptop-4-nodes.json"))

    def selfcheck(job, *_args):
        asked.append(job)
        return SelfcheckReport(version="0", created="2026-01-01T00:00:00Z", machines=[], paths=[])

    monkeypatch.setattr("hpctrain.launch.probe.probe_job", probe)
    monkeypatch.setattr("hpctrain.cli.commands.selfcheck.selfcheck_job", selfcheck)
    return asked


@pytest.mark.parametrize("verb", ["probe", "selfcheck"])
def test_a_job_on_each_node_takes_the_same_options(node_jobs, hpctrain, verb):
    words = "-p high -A physics -q long -N 2 -t 30 -C a100 -w gpu[1-2] -x gpu3 -J trial -G a100:4"
    hpctrain(verb, *words.split())
    (job,) = node_jobs
    argv = srun_command(job, ["x"])
    assert set(argv) == {
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--exclusive", "--kill-on-bad-exit=0", "--wait=0",
        "--job-name=trial", "--partition=high", "--account=physics", "--qos=long", "--time=30", "--constraint=a100",
        "--nodelist=gpu[1-2]", "--exclude=gpu3", "--gpus-per-node=a100:2", "--gpu-bind=none", "x",
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["probe", "selfcheck"])
def test_without_options_the_job_has_only_its_nodes_its_name_and_15_minutes(node_jobs, hpctrain, verb):
    hpctrain(verb, "-w", "gpu[1-3]")
    hpctrain(verb, "-N2")
    assert [job.nodes for job in node_jobs] == [3, 2]
    assert set(srun_command(node_jobs[1], ["x"])) == {
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--exclusive", "--kill-on-bad-exit=0", "--wait=0",
        f"--job-name=hpctrain-{verb}", "--time=15", "x",
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["probe", "selfcheck"])
def test_gpus_are_counted_on_the_nodes_that_the_defaults_leave(fake, node_jobs, hpctrain, monkeypatch, tmp_path, verb):
    module = {"probe": "topology"}.get(verb, verb)
    monkeypatch.setattr(f"hpctrain.cli.commands.{module}.SystemRunner", lambda: fake)
    site = tmp_path / "hpctrain" / "site.yaml"
    site.parent.mkdir()
    site.write_text("profiles: {fake: {match: fake, cluster: {partition: high, exclude: 'gpu[2-3]'}}}")
    site.chmod(0o600)
    refused = hpctrain(verb, "-G", "8")
    assert "8 GPUs, the same number on each node, fit no number of nodes: a node has up to 4, all have 4" in str(
        refused.exception
    )
    hpctrain(verb, "-G", "4")
    (job,) = node_jobs
    assert (job.nodes, job.gpus_per_node, job.partition, job.exclude) == (1, 4, "high", "gpu[2-3]")
    fake.away = True
    refused = hpctrain(verb, "-G", "4")
    assert str(refused.exception).startswith("-G/--gpus: not known how many GPUs a node has (")
    assert "; add -N" in str(refused.exception)


@pytest.mark.parametrize("verb", ["probe", "selfcheck"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-N", "2-3"], "-N/--nodes: found 2-3; allowed here: one number"),
        (["-N", "2", "-w", "gpu[1-3]"], "nodelist names 3 nodes, and nodes is 2"),
        (["-N", "2", "-t", "t.json"], "-t/--time: found 't.json'; allowed: minutes"),
        (["--local", "-p", "high"], "-p/--partition: only for a Slurm job; add -N"),
        (["--local", "-N2"], "give one of --local"),
    ],
)
def test_wrong_options_of_a_job_on_each_node(node_jobs, hpctrain, verb, words, text):
    local = ["--local", "2"] if verb == "probe" else ["--local"]
    result = hpctrain(verb, *[part for word in words for part in (local if word == "--local" else [word])])
    assert text in str(result.exception)
    assert not node_jobs


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", "r.yaml", "-t", "t.json"], "train` starts no Slurm job; a file is given as --topology t.json"),
        (["train", "r.yaml", "-p", "plan.json"], "a file is given as --plan plan.json"),
        (["train", "r.yaml", "-t", "2:00:00"], "starts no Slurm job; leave it out, or use `hpctrain submit`"),
        (["plan", "r.yaml", "-t", "t.json"], "plan` starts no Slurm job; a file is given as --topology t.json"),
        (["simulate", "plan.json", "-t", "t.json"], "a file is given as --topology t.json"),
    ],
)  # fmt: skip
def test_commands_without_a_job_refuse_files_given_to_its_letters(hpctrain, words, text):
    result = hpctrain(*words)
    assert text in str(result.exception)
    assert result.exception.exit_code == 2
    assert words[2] not in hpctrain(words[0], "--help").stdout.split()
