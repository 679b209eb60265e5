"""What counts as named rightly: the code of the fault, of the node that has it, and nothing else."""

import pytest

from hpctrain.bench.probe.faults import CASES, CLEAN, judge
from hpctrain.records.topology.topology import Health, Node, Reason, Topology, Verdict

SLOW, CPU = CASES[0], CASES[-1]


def topology(*named: tuple[str, str]) -> Topology:
    reasons = {name: [Reason(code=code, text="t") for node, code in named if node == name] for name in ("a", "b", "")}
    nodes = [Node.model_construct(id=name, health=Health(verdict="ok", reasons=reasons[name])) for name in ("a", "b")]
    faults = [reason for some in reasons.values() for reason in some]
    return Topology.model_construct(nodes=nodes, verdict=Verdict(status="warn", exclude=[], faults=faults, env={}))


@pytest.mark.parametrize(
    ("case", "named", "right"),
    [
        (SLOW, [("b", "SLOW_NODE")], True),
        (SLOW, [], False),
        (SLOW, [("a", "SLOW_NODE")], False),
        (SLOW, [("b", "SLOW_NODE"), ("a", "SLOW_NODE")], False),
        (SLOW, [("b", "SLOW_NODE"), ("", "MTU_MISMATCH")], False),
        (CPU, [("b", "THROTTLED"), ("b", "SLOW_NODE")], True),
        (CPU, [("b", "SLOW_NODE")], False),
        (CLEAN, [], True),
        (CLEAN, [("", "SLOW_LINK")], False),
    ],
)
def test_a_case_is_right_when_its_code_and_no_other_is_named(case, named, right) -> None:
    assert judge(case, "b", topology(*named))[1] is right
