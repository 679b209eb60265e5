"""`python -m hpctrain.worker describe`: what a person's own model is made of and how large its pieces are.

Asked on the command line in JSON, answered on stdout in JSON: {"spec": …} or {"error": …}.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from hpctrain.base.errors import InputError
from hpctrain.launch.code import code_first
from hpctrain.model.describe import Question, describe


def main(argv: list[str]) -> int:
    """Describe the model; 0, or 2 with the mistake in the answer."""
    parser = argparse.ArgumentParser(prog="hpctrain.worker describe")
    parser.add_argument("question", type=lambda text: Question(**json.loads(text)))
    parser.add_argument("--code", type=Path, help="folder that is searched first")
    options = parser.parse_args(argv)
    # Code of other people may print: the answer goes where they cannot reach, and what they say to stderr.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.code is not None:
        code_first(options.code)
    code = 0
    with answer:
        try:
            json.dump({"spec": describe(options.question).to_json()}, answer)
        except InputError as error:
            json.dump({"error": str(error)}, answer)
            code = InputError.exit_code
    return code
