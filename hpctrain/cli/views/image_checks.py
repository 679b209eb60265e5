"""Checks of an image, for `image check` and before a large job is queued."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.clock import SystemClock
from hpctrain.base.errors import InputError, RefusedError
from hpctrain.base.process import SystemRunner
from hpctrain.container.binds import check_binds, parse_bind, program_binds
from hpctrain.container.check import ImageFinding, ImageStart, check_image, examine, host_environment
from hpctrain.container.entry import find_runtime, this_host
from hpctrain.launch.preflight.checks import VERSION_FILE, local_driver_version
from hpctrain.records.run.run import Container, Run
from hpctrain.runs.file_system import file_system_of

LARGE_NODES = 8
"""Fewest nodes of a job whose image is checked before it is queued: the check takes seconds, a failed start of a large
job wastes the wait in the queue."""


def examine_container(container: Container, environ: Mapping[str, str]) -> list[ImageFinding]:
    """Return every finding about an image on this machine.

    Raises:
        InputError: no program here starts images, or the source of a bind does not exist.
        HpctrainError: the image cannot be started.
    """
    check_binds(container.binds)
    binds = [*program_binds(), *map(parse_bind, container.binds)]
    runtime = find_runtime(container.runtime, shutil.which)
    start = ImageStart(container, runtime, this_host(), binds, environ, shutil.which)
    driver = local_driver_version("here", VERSION_FILE).get("here")
    seen = examine(start, file_system_of(Path(container.image)), SystemRunner(), SystemClock())
    return check_image(host_environment(environ, driver), seen)


def check_before_queueing(run: Run) -> list[str]:
    """Check the image of a large job; return lines for the person who submits.

    Raises:
        RefusedError: a run in the image would fail.
        HpctrainError: the image cannot be started.
    """
    container = run.container
    if container is None or container.runtime == "pyxis" or run.cluster.node_range[0] < LARGE_NODES:
        return []
    try:
        find_runtime(container.runtime, shutil.which)
    except InputError:
        return ["container: nothing on this machine starts images, so the image was not looked into"]
    findings = examine_container(container, os.environ)
    wrong = [finding for finding in findings if finding.level == "problem"]
    if wrong:
        words = "; ".join(f"{finding.name}: {finding.value}: {finding.words}" for finding in wrong)
        raise RefusedError(f"container.image: {container.image}: {words}")
    notes = [f"container.image: {item.name}: {item.value}: {item.words}" for item in findings if item.level == "note"]
    return notes or [f"container.image: looked into {container.image}: nothing speaks against it"]
