"""`python -m tools.probe_simulation`: how often a probe calls a good node slow, how well it finds the switches, and
how long it takes with many nodes."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from tools.probe_simulation.tables import SimulationPlan, simulate

TABLES = ("health", "switches", "runtime")


def main() -> None:
    """Simulate probes and print the three tables; with --json, print the record on stdout and the tables on stderr."""
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
