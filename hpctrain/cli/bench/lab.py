"""How commands of `hpctrain bench` measure on the lab that is up, or on one of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from hpctrain.cli.bench.output import say


def on_lab(measure: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Call `measure` for the lab that is up, and return its record; root is required, because the bench changes links.

    Args:
        measure: called as `measure(machine, layout, *arguments, say)`; `say` prints on stderr what is being
            measured.

    Raises:
        InputError: this user is not root, no lab is up, or another command changes the lab.
    """
    from hpctrain.lab.layout import load_layout, state_folder
    from hpctrain.lab.machine import lab_lock, this_machine
    from hpctrain.lab.requirements import require_root

    machine = this_machine()
    require_root(machine, "shape")
    layout = load_layout(state_folder(os.environ))
    with lab_lock():
        return measure(machine, layout, *arguments, say)


@contextlib.contextmanager
def new_lab(spec: Any) -> Iterator[tuple[Any, Any]]:
    """Bring up the lab of a `LabSpec`, yield its `Machine` and `LabLayout`, and remove the lab when the context
    ends.

    Raises:
        InputError: this user is not root, a program is missing, or another command changes the lab.
        HpctrainError: the lab cannot be brought up.
    """
    from hpctrain.lab.layout import LabLayout, state_folder
    from hpctrain.lab.machine import lab_lock, this_machine
    from hpctrain.lab.requirements import require_programs, require_root
    from hpctrain.lab.up import bring_up, clear

    machine = this_machine()
    layout = LabLayout(state_folder(os.environ), spec)
    require_root(machine, "up")
    with lab_lock():
        require_programs(layout.slurm)
        bring_up(machine, layout, False, tell=say)
        try:
            yield machine, layout
        finally:
            clear(machine, layout.folder)
