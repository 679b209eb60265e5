"""`hpctrain bench compression`: measures steps, losses (--convergence) or the parts of a codec (--pieces), and prints
tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from hpctrain.base.errors import InputError
from hpctrain.base.units import format_seconds, format_si
from hpctrain.cli.bench.compression_steps import gpu_pieces_table, steps_table
from hpctrain.cli.bench.lab import new_lab
from hpctrain.cli.bench.output import GIVEN, bench_console, check_rates, echo_json, say
from hpctrain.cli.options.starting import parse_seeds
from hpctrain.cli.views.console import Console

ROWS_FILE, TRAININGS_FILE = "steps.jsonl", "trainings.jsonl"
PAGE_FILE, PARETO_FILE = "convergence.html", "pareto.md"
ALONE = "none"
"""Name of the bench's method without communication. Each worker then trains a model of its own, so its losses say
nothing about compression."""


_COMPRESSION_OPTIONS = {
    "--pieces": {"device"},
    "--convergence": {"rates", "seeds", "methods", "steps", "preset", "texts", "learning_rates", "output"},
    "--lab": {
        "lab",
        "nodes",
        "devices",
        "rates",
        "methods",
        "steps",
        "together",
        "preset",
        "output",
        "activations",
        "hybrid",
    },
    "": {"nodes", "methods", "steps", "together", "preset", "output", "activations", "hybrid"},
}
"""Parameters that each kind of `bench compression` takes, by the option that selects the kind; '' is the default kind:
steps on this machine."""


@click.command("compression")
@click.option(
    "--lab", type=click.Path(path_type=Path),
    help="Spec of a lab that is brought up for the bench. Default: processes of this machine, on its loopback.",
)  # fmt: skip
@click.option(
    "--nodes", type=click.IntRange(2), multiple=True,
    help="Number of nodes; may be given again.  [default: 4, and 8 in a lab that has them]",
)  # fmt: skip
@click.option(
    "--devices", type=click.IntRange(1), default=1, show_default=True,
    help="Processes on each node of a lab; with 2 or more, also methods that sum within nodes first.",
)  # fmt: skip
@click.option(
    "--rate", "rates", multiple=True, default=("100mbit", "1gbit"),
    help="Rate of the lab's links, or of the network that --convergence simulates; may be given again.",
)  # fmt: skip
@click.option("--convergence", is_flag=True, help="Instead: train with each method, and compare the losses.")
@click.option(
    "--activations", is_flag=True,
    help="Instead: a pipeline over the nodes, with messages in fp32, bf16 and int8.  [--nodes: 2 and 4 in a lab]",
)  # fmt: skip
@click.option(
    "--hybrid", is_flag=True,
    help="Instead: replicas of pipelines of 2 nodes, with gradients summed beside the pipeline, and after it ('late').",
)  # fmt: skip
@click.option("--pieces", is_flag=True, help="Instead: time to choose and encode numbers, beside torch's top-k.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
    help="With --pieces: device to measure. auto: a GPU if torch finds one.",
)  # fmt: skip
@click.option("--seeds", metavar="SET", default="1", help="Seeds of each method: 1-3, or 1,2,5.")
@click.option(
    "--text", "texts", multiple=True, type=click.Choice(["mixed", "documents", "code"]), default=("mixed",),
    help="With --convergence: files of this machine to train on; may be given again.",
)  # fmt: skip
@click.option(
    "--lr", "learning_rates", metavar="SET", default="2e-3", show_default=True,
    help="With --convergence: peak learning rate. Of several, as 1e-3,2e-3,4e-3, each method gets its best, which a "
    "model of 0.13 M parameters finds.",
)  # fmt: skip
@click.option("--method", "methods", multiple=True, help="Only this method; may be given again.")
@click.option("--steps", type=click.IntRange(min=2), help="Steps of each row.  [default: 20; 2000 with --convergence]")
@click.option(
    "--together", type=click.IntRange(min=1),
    help="Methods that take turns in one launch, whose rows are kept when it ends; on slow links few.  [default: all]",
)  # fmt: skip
@click.option(
    "--preset",
    help="A preset's model in place of one of 10.87 M parameters (0.68 M with --convergence, which also has 0.13m).",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the rows; a bench that was ended goes on with those that are missing.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON on stdout.")
def compression(
    lab: Path | None, nodes: tuple[int, ...], devices: int, rates: tuple[str, ...], methods: tuple[str, ...],
    steps: int | None, together: int | None, preset: str | None, output: Path | None, convergence: bool,
    activations: bool, hybrid: bool, pieces: bool, device: str, seeds: str, texts: tuple[Any, ...],
    learning_rates: str, as_json: bool,
) -> None:  # fmt: skip
    """Measure methods of summing gradients, which take turns: time of a step, processor seconds, and bytes at the
    network interface.

    With --convergence: the loss after equally many steps and after equal time, with the gap to exact sums. With
    --pieces: the time to choose and encode the numbers of a sparse message, and of integers.
    """
    asked = {"--pieces": pieces, "--convergence": convergence, "--lab": lab is not None}
    kind = next((name for name, wanted in asked.items() if wanted), "")
    context = click.get_current_context()
    given = [option for option in context.command.params if context.get_parameter_source(option.name or "") is GIVEN]
    for option in given:
        if option.opts[-1] not in (kind, "--json") and option.name not in _COMPRESSION_OPTIONS[kind]:
            raise InputError(
                f"{option.opts[-1]}: not with{f' {kind}' if kind else 'out --lab, --convergence or --pieces'}"
            )
    check_rates(rates)
    people = bench_console(as_json, 140)
    if pieces:
        record = _measure_pieces(device, people)
    elif convergence:
        trained = _convergence_settings(steps or 2000, preset, texts, learning_rates)
        record = _measure_convergence(rates, methods, parse_seeds(seeds), trained, output, people)
    else:
        what = "activations" if activations else "hybrid" if hybrid else "sums"
        size = steps or 20
        record = _measure_steps(lab, nodes, devices, rates, methods, size, together, preset, what, output, people)
    echo_json(record, as_json)


def _measure_steps(
    lab: Path | None, nodes: Sequence[int], devices: int, rates: Sequence[str], methods: Sequence[str],
    count: int, together: int | None, preset: str | None, what: str, output: Path | None, people: Console,
) -> dict[str, Any]:  # fmt: skip
    """Measure the steps of each method, print the table, and return the record.

    Args:
        lab: spec file of a lab to bring up for the bench; None: processes of this machine.
        nodes: numbers of nodes to measure, one after the other; (): 4, and in a lab also 8.
        devices: processes on each node of a lab.
        rates: rates of the lab's links, such as 100mbit.
        methods: names of methods; (): all that such nodes allow.
        count: steps of each row of the table.
        together: number of methods that take turns in one launch; None: all of them.
        preset: preset of the model; None: the bench's own small model.
        what: what the methods are: sums (gradient synchronisations of whole replicas), activations (pipelines over the
            nodes), or hybrid (replicas of pipelines).
        output: folder in which the rows are kept; None: nowhere.
        people: console that prints the table.
    """
    from hpctrain.base.process import SystemRunner
    from hpctrain.bench.compression.bench_trainer import HYBRIDS, PIPELINE_SPEC, PIPELINES
    from hpctrain.bench.compression.launch import BENCH_SPEC, LaunchSettings, as_json
    from hpctrain.bench.compression.methods import LEVEL_METHODS, METHODS
    from hpctrain.bench.compression.step_times import lab_site, local_site, measure
    from hpctrain.bench.record import RowStore
    from hpctrain.lab.spec import read_lab_spec

    usual = LaunchSettings(spec=BENCH_SPEC)
    if what == "activations":
        usual = LaunchSettings(spec=PIPELINE_SPEC, rows=2, seq_len=128)
    elif what == "hybrid":
        usual = replace(usual, rows=4, seq_len=128)
        if any(number % 2 for number in nodes):
            raise InputError(f"--nodes: found {', '.join(map(str, nodes))} with --hybrid; give even numbers")
    settings = replace(usual, steps=count, spec=usual.spec if preset is None else _spec(preset))
    sums = {name: method for name, method in METHODS.items() if devices > 1 or name not in LEVEL_METHODS}
    tables: dict[str, dict[str, Any]] = {"sums": sums, "activations": PIPELINES, "hybrid": HYBRIDS}
    table = tables[what]
    chosen = _known(methods, table) or list(table)
    path = output / ROWS_FILE if output else None
    if lab is None:
        store = RowStore(path, as_json(settings))
        places = [local_site(number) for number in nodes or (4,)]
        record = measure(SystemRunner(), places, chosen, settings, store, say, together)
    else:
        spec = read_lab_spec(lab)
        have = len(spec.nodes)
        usual_sizes = {"sums": (4, 8), "activations": (2, 4), "hybrid": (4,)}[what]
        sizes = list(nodes) or [number for number in usual_sizes if number <= have] or [have]
        if max(sizes) > have:
            raise InputError(f"--nodes {max(sizes)}: {lab} has {have}; give at most that many")
        store = RowStore(path, as_json(settings))
        with new_lab(spec) as (machine, layout):
            # Sites are opened one at a time, because opening a site shapes its links.
            opened = (lab_site(machine, layout, number, rate) for number in sizes for rate in rates)
            record = measure(machine.runner, opened, chosen, settings, store, say, together, devices)
    people.print(steps_table(record["rows"]))
    return record


def _convergence_settings(steps: int, preset: str | None, texts: tuple[Any, ...], learning_rates: str) -> Any:
    from hpctrain.bench.compression.convergence import MODELS, ConvergenceSettings

    peaks = tuple(dict.fromkeys(_learning_rate(item) for item in learning_rates.split(",")))
    name = preset or "0.68m"
    spec = MODELS[name] if name in MODELS else _spec(name, MODELS)
    return ConvergenceSettings(steps=steps, spec=spec, texts=tuple(dict.fromkeys(texts)), learning_rates=peaks)


def _learning_rate(item: str) -> float:
    try:
        rate = float(item)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1:
        raise InputError(f"--lr: found {item!r}; allowed: numbers between 0 and 1, as 2e-3 or 1e-3,2e-3,4e-3")
    return rate


def _measure_convergence(
    rates: Sequence[str], methods: Sequence[str], seeds: Sequence[int], settings: Any, output: Path | None,
    people: Console,
) -> dict[str, Any]:  # fmt: skip
    """Train with each method and seed, print tables of the losses, and return the record.

    Args:
        rates: rates of the simulated network, such as 100mbit.
        methods: names of methods; (): all but `ALONE`.
        seeds: seeds of each method.
        settings: `ConvergenceSettings` of the trainings.
        output: folder for the rows, and pages with curves and with the Pareto front; None: they are not kept.
        people: console that prints the tables.
    """
    import tempfile

    from hpctrain.bench.compression.convergence import REFERENCE, auto_at, compare
    from hpctrain.bench.compression.convergence_summary import summarise, write_page
    from hpctrain.bench.compression.methods import AUTO, LEVEL_METHODS, METHODS
    from hpctrain.bench.compression.pareto import write_pareto
    from hpctrain.bench.record import machine_and_versions
    from hpctrain.lab.spec import rate_bits_per_s

    there = {name: method for name, method in METHODS.items() if name not in LEVEL_METHODS}
    chosen = _known(methods, there) or [name for name in there if name != ALONE]
    chosen = [auto_at(rates[0]) if name == AUTO else name for name in chosen]
    bits = {rate_bits_per_s(rate): rate for rate in rates}
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as temporary:
        path = (output or Path(temporary)) / TRAININGS_FILE
        done = compare(chosen, seeds, settings, path, say)
    if done.searched:
        people.print(_learning_rates_table(done))
    summary = {}
    for text in (*settings.texts, "all") if len(settings.texts) > 1 else settings.texts:
        rows = [row for row in done.rows if text in ("all", row["text"])]
        summary[text] = summarise(rows, REFERENCE, list(bits))
        for table in _convergence_tables(summary[text], text, bits, REFERENCE, done):
            people.print(table)
    if output is not None:
        write_page(output / PAGE_FILE, done.rows, list(bits))
        write_pareto(output / PARETO_FILE, summary[text], bits, settings.spec.parameters())
        people.print(f"curves: {output / PAGE_FILE}; what is worth its loss: {output / PARETO_FILE}", soft_wrap=True)
    return machine_and_versions("compression-convergence", settings.as_json()) | {
        "rows": done.rows,
        "searched": done.searched,
        "summary": [{"text": text} | _plain(one) for text, summaries in summary.items() for one in summaries],
    }


def _measure_pieces(device: str, people: Console) -> dict[str, Any]:
    """Measure the time to choose and encode the numbers of a sparse message, print the table, and return the record.

    Args:
        device: auto, cpu or cuda.
        people: console that prints the table.
    """
    from hpctrain.bench.compression.pieces import GPU_NUMBERS, NUMBERS, measure_on_gpu, measure_pieces
    from hpctrain.bench.record import make_record
    from hpctrain.worker.measure.measure import device_kind

    if device_kind(device) == "cuda":
        name, measured = measure_on_gpu()
        people.print(gpu_pieces_table(name, measured, GPU_NUMBERS))
        return make_record("compression-pieces", measured, {"numbers": GPU_NUMBERS, "device": name})
    rows = measure_pieces()
    table = Table(
        "density", "piece", "CPU ns/number", "least to most", "chosen", "bytes/number",
        title=f"Pieces of a message of {format_si(NUMBERS, 'numbers')}, one thread", title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.density:g}", row.piece, f"{row.cpu_ns_per_number:.2f}", f"{row.low_ns:.2f} to {row.high_ns:.2f}",
            f"{row.chosen:.4f}", "" if row.bytes_per_number is None else f"{row.bytes_per_number:.4f}",
        )  # fmt: skip
    people.print(table)
    return make_record("compression-pieces", rows, {"numbers": NUMBERS, "device": "cpu"})


def _spec(preset: str, further: Iterable[str] = ()) -> Any:
    from hpctrain.launch.small_run import BYTES_VOCABULARY
    from hpctrain.records.model.decoder_spec import DecoderSpec
    from hpctrain.records.model.families import PRESETS

    decoders = {name: spec for name, spec in PRESETS.items() if isinstance(spec, DecoderSpec)}
    if preset not in decoders:
        raise click.BadParameter(
            f"found {preset!r}; there are: {', '.join((*decoders, *further))}", param_hint="--preset"
        )
    return decoders[preset].model_copy(update={"vocab": BYTES_VOCABULARY})


def _known(methods: Sequence[str], table: dict[str, Any]) -> list[str]:
    for name in methods:
        if name not in table:
            raise click.BadParameter(f"found {name!r}; there are: {', '.join(table)}", param_hint="--method")
    return list(dict.fromkeys(methods))


def _learning_rates_table(done: Any) -> Table:
    rates = sorted({row["learning_rate"] for row in done.searched})
    table = Table(
        "method", *(f"{rate:g}" for rate in rates), "best",
        title="Losses by learning rate, 0.13 M parameters", title_justify="left",
        caption="a best rate at an edge of the grid: a better one may lie beyond", caption_justify="left",
    )  # fmt: skip
    for method, best in done.learning_rates.items():
        losses = {row["learning_rate"]: row.get("loss") for row in done.searched if row["method"] == method}
        cells = ("" if rate not in losses else _loss(losses[rate]) for rate in rates)
        edge = ", at an edge" if best in (rates[0], rates[-1]) else ""
        table.add_row(method, *cells, f"{best:g}{edge}")
    return table


def _loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def _convergence_tables(
    summaries: Sequence[Any], text: str, names: dict[float, str], reference: str, done: Any
) -> Iterator[Table]:
    choices: dict[str, dict[str, None]] = {}
    for row in done.rows:
        if "choice" in row:
            choices.setdefault(row["method"], {})[row["choice"]] = None
    on = "all texts" if text == "all" else f"the text {text}"
    table = Table(
        "method", "learning rate", "loss", f"gap to {reference}, %", "trainings", "diverged", "bytes a step",
        "after warm-up", "CPU a step", title=f"On {on}, at equal steps: means, 95 % interval", title_justify="left",
    )  # fmt: skip
    for summary in summaries:
        table.add_row(
            ": ".join([summary.method, *([" or ".join(choices[summary.method])] if summary.method in choices else [])]),
            f"{done.learning_rates[summary.method]:g}",
            _band(summary.loss, "{:.4f}"), _band(summary.gap_pct, "{:+.2f}"),
            str(summary.loss.seeds if summary.loss else 0), str(summary.diverged),
            *("" if sent is None else format_si(sent, "B") for sent in (summary.sent_bytes, summary.late_sent_bytes)),
            format_seconds(summary.cpu_s),
        )  # fmt: skip
    yield table
    for rate, name in names.items():
        table = Table(
            "method", "step", f"gap to {reference}, %", f"time to 1 % above {reference}'s last loss",
            title=f"On {on}, at equal time on links of {name}: when the fastest method has made its steps",
            title_justify="left",
        )  # fmt: skip
        for summary in summaries:
            if rate in summary.at_rate:
                at_rate = summary.at_rate[rate]
                target = "not reached" if at_rate.target_s is None else format_seconds(at_rate.target_s)
                table.add_row(summary.method, format_seconds(at_rate.step_s), _band(at_rate.gap_pct, "{:+.2f}"), target)
        yield table


def _band(band: Any, form: str) -> str:
    if band is None:
        return ""
    text = form.format(band.mean)
    return text if band.half_width is None else f"{text} ± {band.half_width:.2g}"


def _plain(summary: Any) -> dict[str, Any]:
    """Return a method's summary of `--convergence` as JSON values: link rates, which are keys, become text, and values
    of None are left out."""
    value = asdict(summary)
    value["at_rate"] = {f"{rate:g}": _known_values(at_rate) for rate, at_rate in value["at_rate"].items()}
    return _known_values(value)


def _known_values(value: dict[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if entry is not None}
