"""`python -m tools.published_runs`: the cost model's predictions compared with tables of published runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpctrain.base.errors import HpctrainError
from tools.published_runs.measure import DATA_VARIABLE, data_files, measure
from tools.published_runs.show import show
from tools.published_runs.utilization import best_runs, show_utilization, summarize


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the predictions with the runs, and print tables; with --json, print the record on stdout and the
    tables on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.published_runs", description=__doc__)
    parser.add_argument(
        "--data", type=Path, help=f"table of measured runs, or folder of tables; default: ${DATA_VARIABLE}"
    )
    text = "instead: which share of their GPUs' data sheets the runs reached, by all tables in the folder"
    parser.add_argument("--utilization", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print the record as JSON on stdout")
    options = parser.parse_args(argv)
    try:
        paths = data_files(options.data)
        if options.utilization:
            record = summarize(best_runs(paths[0].parent))
        else:
            record = measure(paths, lambda what: print(f"measuring {what}", file=sys.stderr))
    except HpctrainError as error:
        sys.exit(str(error))
    console = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 140)
    (show_utilization if options.utilization else show)(record, console)
    if options.json:
        print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
