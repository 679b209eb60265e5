"""`python -m hpctrain.worker describe`: the layers of a user's own model and their sizes, or those of a Hugging Face
folder whose model transformers builds.

The request is JSON on the command line, the reply is JSON on stdout: {"spec": …}, {"hf_model": …} or {"error": …}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hpctrain.model.from_transformers.describe import FolderRequest, describe_folder
from hpctrain.model.imported.describe import DescribeRequest, describe
from hpctrain.runs.code_copy import import_code_first
from hpctrain.worker.verbs.json_reply import json_reply


def main(argv: list[str]) -> int:
    """Describe the model that the request names. Return 0, or the exit code of an error that the reply describes."""
    parser = argparse.ArgumentParser(prog="hpctrain.worker describe")
    parser.add_argument("question", type=_request)
    parser.add_argument("--code", type=Path, help="folder that is searched first")
    options = parser.parse_args(argv)
    if options.code is not None:
        import_code_first(options.code)
    return json_reply(lambda: _described(options.question))


def _request(text: str) -> DescribeRequest | FolderRequest:
    values = json.loads(text)
    return FolderRequest(**values) if "folder" in values else DescribeRequest(**values)


def _described(request: DescribeRequest | FolderRequest) -> dict[str, Any]:
    if isinstance(request, FolderRequest):
        return {"hf_model": describe_folder(request).to_json()}
    return {"spec": describe(request).to_json()}
