"""`hpctrain export RUN -o DIR`: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hpctrain.base.process import SystemRunner
from hpctrain.base.units import format_bytes
from hpctrain.cli.options.run_and_paths import PATH, RUN
from hpctrain.hf.tensors import BYTES, shard_bytes
from hpctrain.launch.checkpoints import export


@click.command()
@click.argument("folder", metavar="RUN", type=RUN)
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Folder to make.")
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint of that step. Default: the newest.")
@click.option(
    "--dtype", type=click.Choice(list(BYTES)), default="float32", help="Type of the numbers; float32 loses nothing."
)
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="The largest file.")
@click.option("--force", is_flag=True, help="Replace the model that lies in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def command(
    folder: Path, output: Path, step: int | None, dtype: str, max_shard_size: str, force: bool, as_json: bool
) -> None:
    """Write a run's checkpoint as a Hugging Face folder: weights, config.json, tokenizer and a model card.

    The checkpoint may be of any plan, and the run may still be in progress. `AutoModel…from_pretrained(DIR)` of
    transformers loads the folder; hpctrain itself needs no transformers.
    """
    done = export(folder, output, step, dtype, shard_bytes(max_shard_size), force, SystemRunner())
    if as_json:
        click.echo(json.dumps({"folder": str(output.resolve()), **asdict(done)}))
        return
    click.echo(f"{output}: {done.architecture} after step {done.step}, {done.parameters:,} parameters")
    click.echo(f"  {', '.join(done.files)}: {format_bytes(done.size_bytes)}")
