"""A process knows whether the one that it was started for is there, whatever lies between them."""

from __future__ import annotations

import subprocess

from hpctrain.node.probe import Parent


def test_a_parent_is_gone_when_it_has_ended_even_while_nobody_buried_it() -> None:
    process = subprocess.Popen(["sleep", "30"])
    parent = Parent(process.pid)
    assert not parent.is_gone()
    process.kill()
    while not parent.is_gone():  # a zombie now: nobody has waited for it
        pass
    process.wait()
    assert parent.is_gone()
    assert Parent(process.pid).is_gone()
