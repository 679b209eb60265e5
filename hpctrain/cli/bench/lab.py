"""How commands of `hpctrain bench` measure on the lab that is up."""

from __future__ import annotations

import os
from collections.abc import Callable
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
