"""`hpctrain schema`: the JSON Schema of a file, for editors and for people."""

from __future__ import annotations

import json

import click

from hpctrain.records.corpus import Recipe
from hpctrain.records.format.document import Document
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.run.site import Site
from hpctrain.records.topology.topology import Topology

KINDS: dict[str, type[Document]] = {
    "run": Run,
    "recipe": Recipe,
    "site": Site,
    "topology": Topology,
    "plan": Plan,
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
def command(kind: str) -> None:
    """Print the JSON Schema of a file: every key, its meaning, type and default.

    An editor checks and completes run.yaml with it: save it beside the file and begin run.yaml with the line
    `# yaml-language-server: $schema=run.schema.json`.
    """
    schema = KINDS[kind].model_json_schema(by_alias=True)
    click.echo(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1))
