"""Slurm's options of the commands that submit a job, with Slurm's letters, names and meaning: `-p/--partition`,
`-t/--time`, `-N/--nodes` and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.process import Runner
from hpctrain.jobs.total_gpus import NodeFilter, divide_gpus, gpus_of_nodes
from hpctrain.launch.preflight.site import VARIABLES
from hpctrain.launch.probe import ProbeJob, with_site_defaults
from hpctrain.records.format.validation_errors import validation_errors
from hpctrain.records.format.yaml_file import Override
from hpctrain.records.run.cluster import Cluster
from hpctrain.records.run.run import Run
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.values import parse_time_limit

_FILE_OPTIONS = {"partition": "--plan", "time": "--topology"}
"""For the two options whose letter a file may be given to: the option that takes such a file."""
_LOOKS_LIKE_FILE = re.compile(r".*(/|\.(json|ya?ml)$)", re.DOTALL | re.IGNORECASE)


class ClusterValue(click.ParamType[str]):
    """A click type for the value of a key of `cluster`. The value is checked as in a run file, and stays a text."""

    name = "text"

    def __init__(self, key: str) -> None:
        self.key = key

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the value unchanged.

        Raises:
            InputError: this option's key of `cluster` does not allow the value, or the value names a file that belongs
                to another option, such as `--plan`.
        """
        option = option_name(param)
        other = _file_option(self.key, value, ctx) if ctx is not None else None
        if other is not None:
            raise InputError(f"{option}: found {value!r}; a file is given as {other} {value}")
        try:
            Cluster.model_validate({self.key: value})
            if self.key == "time":
                parse_time_limit(value)
        except ValidationError as error:
            raise InputError(f"{option}: {validation_errors(error, Cluster)[0].text}") from None
        except ValueError as error:
            raise InputError(f"{option}: {error}") from None
        return str(value)


@dataclass(frozen=True)
class GpuCount:
    """A number of GPUs as Slurm's options take it: '8', or 'a100:8' for GPUs of one type."""

    count: int
    type: str | None = None


class GpuCountType(click.ParamType[GpuCount]):
    """A click type for `[TYPE:]N`."""

    name = "gpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> GpuCount:
        """Return the number and the type.

        Raises:
            InputError: the value has another form.
        """
        form = re.fullmatch(r"(?:([A-Za-z0-9_.+-]+):)?([0-9]{1,7})", value, re.ASCII)
        if form is None:
            raise InputError(f"{option_name(param)}: found {value!r}; allowed: a number of GPUs, as 8 or a100:8")
        return GpuCount(int(form[2]), form[1])


def option_name(param: click.Parameter | None) -> str:
    """Return an option's names as messages show them: '-t/--time'; 'value' if `param` is None."""
    return "/".join(param.opts) if param is not None else "value"


@dataclass(frozen=True)
class SlurmOptions:
    """The values of Slurm's options on the command line; None for an option that was not given. Making the object
    raises InputError if `gpus` and `gpus_per_node` name different types."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: str | None = None
    time: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    job_name: str | None = None
    gpus: GpuCount | None = None
    gpus_per_node: GpuCount | None = None

    def __post_init__(self) -> None:
        types = {gpus.type for gpus in (self.gpus, self.gpus_per_node) if gpus and gpus.type}
        if len(types) > 1:
            both = f"{NAMES['gpus']} and {NAMES['gpus_per_node']}"
            raise InputError(f"{both}: found types {' and '.join(sorted(types))}; allowed: one type of GPU in a job")

    @property
    def names_nodes(self) -> bool:
        """Whether an option says how many nodes the job gets."""
        return self.nodes is not None or self.nodelist is not None or self.gpus is not None

    @property
    def names(self) -> list[str]:
        """Return the names of the options that were given: ['-p/--partition', '-t/--time']."""
        return [NAMES[item.name] for item in fields(self) if getattr(self, item.name) is not None]

    def overrides(self) -> tuple[str, ...]:
        """Return the options as overrides of a run file; `--gpus` needs a run, see `gpu_overrides`."""
        keys = {item.name: f"cluster.{item.name}" for item in fields(self)} | {"job_name": "name"}
        overrides = [
            Override.of(NAMES[name], keys[name], getattr(self, name))
            for name in keys
            if name not in ("gpus", "gpus_per_node") and getattr(self, name) is not None
        ]
        if self.gpus_per_node is not None:
            overrides += _gpu_keys(NAMES["gpus_per_node"], self.gpus_per_node)
        return tuple(overrides)

    def gpu_overrides(self, run: Run, slurm: Slurm, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return `--gpus`, a number of GPUs for the whole job, as overrides of a run file; () without the option.

        The number of nodes is `cluster.nodes` if `--nodes`, `--nodelist` or `cluster.groups` is given, and with
        `--gpus-per-node` the quotient of the two. Otherwise it is the smallest for which enough nodes have the GPUs, by
        `cluster.devices_per_node` or as Slurm lists the nodes of the partition; if Slurm does not answer, it is
        `cluster.nodes`.

        Args:
            run: the run with the other overrides.
            environ: its SBATCH_PARTITION names the partition if the run names none.

        Raises:
            InputError: the GPUs do not divide over the nodes, `cluster.nodes` is a range where it decides, or the run
                uses no GPUs.
            RefusedError: no node that the job may get has GPUs.
        """
        cluster = run.cluster
        if (self.gpus or self.gpus_per_node) and cluster.device == "cpu":
            name = NAMES["gpus" if self.gpus else "gpus_per_node"]
            raise InputError(f"{name}: cluster.device is cpu, and the run would use no GPU; set it to auto or cuda")
        if self.gpus is None:
            return ()
        option, total = NAMES["gpus"], self.gpus.count
        per_node = self.gpus_per_node.count if self.gpus_per_node else None
        fixed = self.nodes is not None or self.nodelist is not None or bool(cluster.groups)
        sizes = [cluster.devices_per_node] * total if cluster.devices_per_node else []
        if not fixed and per_node is None and not sizes:
            partition = cluster.partition or environ.get(VARIABLES["partition"])
            wanted = NodeFilter(partition, self.gpus.type or cluster.gpu_type, cluster.constraint, cluster.exclude)
            try:
                sizes = gpus_of_nodes(option, slurm, wanted)
            except CommandError:
                fixed = True
        fewest, most_nodes = cluster.node_range
        if fixed and fewest != most_nodes:
            raise InputError(
                f"{option}: cluster.nodes is {cluster.nodes}; give one number of nodes, or --gpus-per-node"
            )
        nodes = divide_gpus(option, total, fewest if fixed else None, per_node, sizes)
        counted = [] if fixed else [Override.of(option, "cluster.nodes", str(nodes))]
        return (*counted, *_gpu_keys(option, replace(self.gpus, count=total // nodes)))

    def check_are_used(self, run: Run, local: bool = False) -> None:
        """Check that the options that were given mean something for the run: a run that is no Slurm job has nodes and
        a name only.

        Args:
            local: whether `--local` was given, which makes `cluster.kind` local.

        Raises:
            InputError: an option is for Slurm jobs, and `cluster.kind` is local.
        """
        useless = [name for name in self.names if name not in (NAMES["nodes"], NAMES["job_name"])]
        if run.cluster.kind == "local" and useless:
            given = ", ".join(useless)
            if local:
                raise InputError(f"{given}: only for a Slurm job; leave out --local, or leave out {given}")
            raise InputError(f"{given}: only for a Slurm job, and cluster.kind is local; add --set cluster.kind=slurm")

    def check_given_with_nodes(self) -> None:
        """Check that none of these options was given, for a command that starts no Slurm job unless an option says how
        many nodes the job gets. Call this method only if none does (`names_nodes`).

        Raises:
            InputError: an option was given.
        """
        if self.names:
            raise InputError(f"{', '.join(self.names)}: only for a Slurm job; add -N with its number of nodes")

    def unused_in_allocation(self) -> list[str]:
        """Return a line that names the options that mean nothing inside an allocation (salloc), which has its nodes and
        its time limit already; [] if none of them was given."""
        unused = [name for name in self.names if name not in (NAMES["job_name"], NAMES["gpus"], NAMES["gpus_per_node"])]
        return [f"{', '.join(unused)}: not used, as the allocation is there already"] if unused else []

    def check_not_given(self, option: str, but: Collection[str] = ()) -> None:
        """Check that no option was given, because the job exists already.

        Args:
            option: the option that says that the job exists, for the error.
            but: fields of the options that may be given.

        Raises:
            InputError: an option was given.
        """
        useless = [name for name in self.names if name not in [NAMES[field] for field in but]]
        if useless:
            raise InputError(f"{option}: this job runs already; leave out {', '.join(useless)}")

    def node_job(self, name: str, runner: Runner) -> tuple[ProbeJob, list[str]]:
        """Return the job that runs something once on each node, for `hpctrain probe` and `hpctrain selfcheck`, with the
        defaults of this cluster; and lines that name these defaults.

        Call it only if an option says how many nodes the job gets (`names_nodes`).

        Args:
            name: name of the job without `--job-name`.

        Raises:
            InputError: `--nodes` is a range, options contradict each other, or the GPUs do not divide over the nodes.
            RefusedError: no node that the job may get has GPUs.
            CommandError: the number of nodes depends on how many GPUs a node has, and Slurm does not answer.
            FileError: site.yaml is wrong.
        """
        # The keys of a run file are checked together, as in a run file.
        keys = {key: value for key in ("nodes", "nodelist", "exclude") if (value := getattr(self, key)) is not None}
        try:
            fewest, most = Cluster.model_validate(keys).node_range
        except ValidationError as error:
            raise InputError(validation_errors(error, Cluster)[0].text) from None
        if fewest != most:
            raise InputError(f"{NAMES['nodes']}: found {self.nodes}; allowed here: one number, as each node takes part")
        per_node = self.gpus_per_node.count if self.gpus_per_node else None
        of_type = next((gpus.type for gpus in (self.gpus, self.gpus_per_node) if gpus and gpus.type), None)
        job = ProbeJob(
            fewest, self.partition, self.account, self.qos, self.time or PROBE_TIME, self.nodelist, per_node,
            self.job_name or name, self.constraint, self.exclude, of_type,
        )  # fmt: skip
        job, lines = with_site_defaults(job, runner)
        if self.gpus is not None:
            option, total = NAMES["gpus"], self.gpus.count
            given = fewest if self.nodes or self.nodelist else None
            sizes: list[int] = []
            if given is None and per_node is None:
                wanted = NodeFilter(job.partition, of_type, job.constraint, job.exclude)
                try:
                    sizes = gpus_of_nodes(option, Slurm(runner), wanted)
                except CommandError as error:
                    raise CommandError(f"{option}: not known how many GPUs a node has ({error}); add -N") from None
            nodes = divide_gpus(option, total, given, per_node, sizes)
            job = replace(job, nodes=nodes, gpus_per_node=total // nodes)
        return job, lines


PROBE_TIME = "15"
"""Time limit of the job of a probe or a selfcheck if no option gives one, in minutes."""


def _gpu_keys(option: str, gpus: GpuCount) -> list[Override]:
    typed = [Override.of(option, "cluster.gpu_type", gpus.type)] if gpus.type else []
    return [*typed, Override.of(option, "cluster.devices_per_node", gpus.count)]


def _option(letter: str, long: str, metavar: str, kind: click.ParamType[Any], text: str) -> tuple[str, Any, Any]:
    """Return (name of the option's parameter in a command's function, the option's names as messages write them, such
    as '-p/--partition', decorator that adds the option)."""
    names = [name for name in (letter, long) if name]
    decorator = click.option(*names, type=kind, metavar=metavar, help=text)
    return long.strip("-").replace("-", "_"), "/".join(names), decorator


_OPTIONS = [
    _option("-p", "--partition", "NAME", ClusterValue("partition"), "Slurm partition of the job, or several: a,b."),
    _option("-A", "--account", "NAME", ClusterValue("account"), "Slurm account of the job."),
    _option("-q", "--qos", "NAME", ClusterValue("qos"), "Slurm quality of service of the job."),
    _option("-N", "--nodes", "N", ClusterValue("nodes"), "Number of nodes of the job."),
    _option("-t", "--time", "TIME", ClusterValue("time"), "Time limit of the job: 90 (minutes), 2:00:00, 1-12."),
    _option("-C", "--constraint", "FEATURES", ClusterValue("constraint"), "Features that each node has: a100&nvlink."),
    _option("-w", "--nodelist", "NODES", ClusterValue("nodelist"), "These nodes: node[1-4]."),
    _option("-x", "--exclude", "NODES", ClusterValue("exclude"), "Without these nodes: node3,node7."),
    _option("-J", "--job-name", "NAME", click.STRING, "Name of the job."),
    _option("-G", "--gpus", "[TYPE:]N", GpuCountType(), "GPUs of all nodes together."),
    _option("", "--gpus-per-node", "[TYPE:]N", GpuCountType(), "GPUs of each node. Default: all it has."),
]
NAMES = {name: names for name, names, _ in _OPTIONS}
"""By field of `SlurmOptions`: the option's names as messages show them."""

Command = TypeVar("Command", bound=Callable[..., Any])


def slurm_options(command: Command) -> Command:
    """Add Slurm's options to a command that submits a job. The command gets their values as keyword arguments, named as
    the fields of `SlurmOptions`."""
    for _, _, decorator in reversed(_OPTIONS):
        command = decorator(command)
    return command


def no_job_options(command: Command) -> Command:
    """Let a command that starts no job refuse `-t/--time` and `-p/--partition` with a one-line error. If the value of
    `-t` or `-p` looks like a file, the error names the option for it, `--topology` or `--plan`, if the command has this
    option. The help does not show `-t/--time` and `-p/--partition`."""
    for letter, long in (("-t", "--time"), ("-p", "--partition")):
        command = click.option(
            letter, long, hidden=True, expose_value=False, callback=_refuse_job_option, help="Only for a Slurm job."
        )(command)
    return command


def _refuse_job_option(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None or ctx.resilient_parsing:
        return
    other = _file_option(param.opts[-1].strip("-"), value, ctx)
    remedy = f"a file is given as {other} {value}" if other else "leave it out, or use `hpctrain submit`"
    raise InputError(f"{option_name(param)}: `{ctx.command_path}` starts no Slurm job; {remedy}")


def _file_option(key: str, value: str, ctx: click.Context) -> str | None:
    """Return the option of the command that takes the file `value`, which was given to the option for `cluster.<key>`;
    None if the value is no name of a file or the command has no such option."""
    other = _FILE_OPTIONS.get(key)
    known = any(other in item.opts for item in ctx.command.params)
    return other if known and _LOOKS_LIKE_FILE.match(value) else None
