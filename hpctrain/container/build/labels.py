"""Read the labels of an image."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.base.errors import HpctrainError
from hpctrain.base.process import Runner
from hpctrain.container.run.runtime import Runtime

PREFIX = "org.hpctrain."
INPUTS = f"{PREFIX}inputs"
_TIMEOUT_S = 120.0


def labels_of(runtime: Runtime, image: Path, runner: Runner) -> dict[str, str]:
    """Return the labels of an image, including those of its base.

    Raises:
        HpctrainError: the runtime cannot read the file as an image.
    """
    done = runner.run([runtime.path, "--silent", "inspect", "--json", str(image)], timeout_s=_TIMEOUT_S)
    try:
        labels = json.loads(done.stdout)["data"]["attributes"]["labels"] or {}
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"{runtime.name} inspect ended with {done.code}"]
        raise HpctrainError(f"{image}: no image that {runtime.name} can read: {lines[-1]}") from None
    return {str(name): str(value) for name, value in labels.items()}
