"""`hpctrain eval RUN DATA...`: loss and perplexity of a run's checkpoint on other data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from hpctrain.base.process import SystemRunner
from hpctrain.cli.options.run_and_paths import RUN
from hpctrain.launch.checkpoints import CheckpointEvaluation, evaluate


@click.command("eval")
@click.argument("folder", metavar="RUN", type=RUN)
@click.argument("data", metavar="DATA...", nargs=-1, required=True)
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint of that step. Default: the newest.")
@click.option(
    "--split", type=click.Choice(["all", "train", "valid"]), default="all", help="Which part of corpus folders."
)
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="At most N sequences of each. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def command(
    folder: Path,
    data: tuple[str, ...],
    step: int | None,
    split: Literal["all", "train", "valid"],
    samples: int | None,
    as_json: bool,
) -> None:
    """Loss and perplexity of a run's checkpoint on other data.

    DATA is a folder made by `hpctrain data prepare` with the run's tokenizer, or text (files, folders, .gz), which is
    tokenized into a temporary folder. Each DATA gets its own loss, by the run's objective, computed in one process. The
    checkpoint may be of any plan, and the run may still be in progress.

    Only whole sequences of data.seq_len tokens count; a shorter rest at the end of a shard is left out.
    """
    done, judged = evaluate(folder, data, step, split, samples, SystemRunner())
    if as_json:
        rows = [{key: value for key, value in asdict(item).items() if value is not None} for item in judged]
        click.echo(json.dumps({"folder": str(folder), "step": done, "data": rows}, allow_nan=False))
        return
    click.echo(f"{folder.name} after step {done}")
    width = max(len(item.path) for item in judged)
    for item in judged:
        click.echo(f"  {item.path:<{width}}  {_words(item)}")


def _words(item: CheckpointEvaluation) -> str:
    shown = "too large to tell" if item.perplexity is None else f"{item.perplexity:.4g}"
    return f"loss {item.loss:.4f}  perplexity {shown}  {item.tokens:,} tokens"
