"""`hpctrain simulate`: predict a plan's step with changed figures, or a month with failures."""

from __future__ import annotations

import click

from hpctrain.cli.simulate.failures import failures
from hpctrain.cli.simulate.step import step


class _PlanOrVerb(click.Group):
    """A click group whose first argument may be a plan instead of one of its commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["step", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_PlanOrVerb, subcommand_metavar="PLAN.JSON | failures [OPTIONS]", options_metavar="")
def command() -> None:
    """A plan's step, and what slower nodes or links, lost nodes, jitter or failures would do.

    \b
    hpctrain simulate PLAN.JSON --slow n3=0.5     the step before and after
    hpctrain simulate PLAN.JSON --help            all what-ifs
    hpctrain simulate failures --help             a month of failures on thousands of GPUs

    All figures are predictions by the planner's cost model; no training runs.
    """


command.add_command(step)
command.add_command(failures)
