"""`python -m hpctrain.selfcheck --folder F`: runs the selfcheck's paths on one node of a job and writes the report
F/selfcheck-NODE.json."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

from hpctrain.base.errors import HpctrainError
from hpctrain.records.history.selfcheck import PathResult
from hpctrain.selfcheck.report import check_machine


def main(argv: list[str]) -> int:
    """Run the selfcheck's paths and write the report. Return 0, or the exit code of an error that prevented the
    selfcheck; a failed path is no such error."""
    parser = argparse.ArgumentParser(prog="hpctrain.selfcheck")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that the nodes of the job share")
    parser.add_argument("--only", action="append", default=[], help="part of the name of a path to run")
    options = parser.parse_args(argv)
    node = os.environ.get("SLURMD_NODENAME") or platform.node()

    def tell(path: PathResult) -> None:
        print(f"{node}: {path.verdict}: {path.path}", flush=True)

    try:
        check_machine(node, tell, options.only).write(options.folder / f"selfcheck-{node}.json")
    except HpctrainError as error:
        print(f"hpctrain selfcheck: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
