"""`python -m tools.probe_simulation`: how often a good node is called slow, which switches are found, and how long a
probe of many nodes takes."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from tools.probe_simulation.tables import SimulationPlan, simulate

TABLES = ("health", "switches", "runtime")


def main() -> None:
    """Simulate and print the three tables, or with --json the record."""
    defaults = SimulationPlan()
    parser = argparse.ArgumentParser(prog="python -m tools.probe_simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=defaults.runs, help="seeded runs of each health row")
    parser.add_argument("--nodes", type=int, nargs="+", default=defaults.sizes, help="sizes to time, from 8 on")
    parser.add_argument("--json", action="store_true", help="print the record as JSON on stdout")
    options = parser.parse_args()
    if options.runs < 1 or min(options.nodes) < 8:
        parser.error("--runs must be at least 1, and --nodes at least 8")
    plan = SimulationPlan(runs=options.runs, sizes=options.nodes)
    record = simulate(plan, lambda text: print(f"simulating {text}", file=sys.stderr))
    console = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 120)
    for name in TABLES:
        table = Table(*record[name][0], title=name, title_justify="left")
        for row in record[name]:
            table.add_row(*(f"{value:.5g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    if options.json:
        print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
