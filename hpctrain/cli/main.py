"""The `hpctrain` command. A table lists its commands, so that `hpctrain --help` imports no command's module."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import click

from hpctrain import __version__
from hpctrain.base.errors import EXIT_FAILED, HpctrainError
from hpctrain.base.loading import load
from hpctrain.base.module_argv import without_implied_folder
from hpctrain.base.output_streams import escaped_output

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("commands.demo", "Everything below once, on this machine: no Slurm, no root, under 3 minutes."),
    "init": ("commands.run_file", "Write a commented run file fitted to this machine."),
    "doctor": ("commands.doctor", "Say what this machine and its cluster allow, and what would harm a run."),
    "selfcheck": ("commands.selfcheck", "Run every path of devices and training once, and say which work."),
    "image": ("commands.image", "Build and check the images that runs happen in."),
    "data": ("commands.data", "Turn text into token shards, and check them."),
    "probe": ("commands.topology", "Measure nodes, devices and links into a topology file."),
    "topology": ("commands.topology", "Read, compare and convert topology files."),
    "plan": ("commands.plan", "From a run file and a topology to a plan, with its reasons."),
    "simulate": ("commands.simulate", "A plan's step, and what slower nodes, lost nodes or failures would do."),
    "train": ("commands.train", "Train as local processes: the same run without a queue."),
    "submit": ("commands.submit", "Submit a run as one job: probe if needed, plan, train, recover."),
    "status": ("commands.follow", "Say how a run is doing."),
    "watch": ("commands.follow", "Watch a run until it ends: figures, slow ranks, events; or a sweep."),
    "logs": ("commands.follow", "Print the end of the logs of a run, merged by time; -f follows them."),
    "list": ("commands.follow", "List the runs here, and those you started elsewhere, with their state."),
    "cancel": ("commands.manage", "Stop a run for good, with a checkpoint first."),
    "resubmit": ("commands.resubmit", "Submit a run again that was cancelled or failed."),
    "exec": ("commands.manage", "Run a command inside a running job, on one of its nodes."),
    "prune": ("commands.manage", "List what old runs and checkpoints would free; remove it with --yes."),
    "report": ("commands.results", "Write the report.html of a run or a sweep."),
    "compare": ("commands.results", "Compare runs: settings, losses at equal steps, time, cost, means over seeds."),
    "track": ("commands.results", "Write metrics into TensorBoard, MLflow, Weights & Biases or Prometheus."),
    "trace": ("commands.results", "Write a step as a trace of all ranks, for Perfetto, with the predicted one."),
    "eval": ("commands.results", "Loss and perplexity of a run's checkpoint on other data."),
    "export": ("commands.results", "Write a run's checkpoint as a Hugging Face folder that transformers loads."),
    "convert": ("commands.results", "Make a Hugging Face folder of a checkpoint of torchtitan, Megatron or torch DCP."),
    "lab": ("commands.lab", "A real Slurm of several nodes on this machine, with faults on demand."),
    "bench": ("bench.group", "Side-by-side measurements on this machine."),
    "schema": ("commands.run_file", "Print the JSON Schema of a file, for editors."),
    "completion": ("commands.completion", "Print the script with which a shell completes hpctrain's words."),
    "docs": ("commands.docs", "Print a page of the documentation, or list the pages."),
}
"""By command: the module within `hpctrain.cli` that defines the command as the function `<command>_command`, and the
command's line in `hpctrain --help`."""


class Verbs(click.Group):
    """A click group that imports a command's module only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(load(f"hpctrain.cli.{VERBS[cmd_name][0]}"), f"{cmd_name}_command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem  # only for a shell that completes

        verbs = [CompletionItem(verb, help=text) for verb, (_, text) in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            import difflib  # only for a typo

            close = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"allowed: {', '.join(VERBS)}"
            ctx.fail(f"no command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="hpctrain")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
def cli(debug: bool) -> None:
    """Train a Transformer on a shared, mixed, unreliable cluster: probe, plan, train, survive.

    \b
    Exit codes: 0 done, 1 the work failed, 2 wrong usage or invalid input,
                3 go with warnings, 4 refused.
    """


def main() -> None:
    """Run the command line. An error of hpctrain becomes lines on stderr and an exit code."""
    without_implied_folder(os.environ)
    # As SystemExit, SIGTERM passes through every `finally`, so that everything that was started is ended. At the exit,
    # Python prints the text, and the code is 1.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("hpctrain: ended by SIGTERM"))
    if "_HPCTRAIN_COMPLETE" in os.environ:  # a shell's completion script asks for words
        load("hpctrain.cli.commands.completion")  # its shells take the place of Click's
        cli()  # ends the process; Click writes bytes, which `escaped_output` does not take
    with escaped_output():
        _run()


def _run() -> None:
    debug = "--debug" in sys.argv
    try:
        cli(standalone_mode=True)
    except HpctrainError as error:
        if debug:
            raise
        for line in str(error).split("\n"):
            click.echo(f"hpctrain: {line}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of stdout (head, less) is gone: print nothing more, and no traceback at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
