"""Which partition a job goes to: what speaks for one weighs as the docstring says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.slurm.cluster import NodeInfo, Partition, constraint_of_groups, has_features, parse_gres
from hpctrain.slurm.limits import JobRequest, check_request, choose_partition

HOUR = 3600
ASKED = JobRequest(None, 2, 2, HOUR, None, None, None)


def node(name: str, state: str = "IDLE", gres: str = "gpu:a100:4", features: tuple[str, ...] = ()) -> NodeInfo:
    return NodeInfo(name, name, frozenset(state.split("+")), parse_gres(gres), features)


def partition(name: str, nodes: str = "abc", limit_h: int | None = 24, **more: object) -> Partition:
    plain = Partition(
        name, False, "UP", tuple(nodes), len(nodes), None, limit_h and limit_h * HOUR, None, "OFF", 0, 1, None, (),
        None, (),
    )  # fmt: skip
    return replace(plain, **more)  # type: ignore[arg-type]


FREE = [node(name) for name in "abc"]
BUSY = [node(name, "ALLOCATED") for name in "xyz"]
BARE = [node(name, gres="(null)") for name in "123"]


def first(
    *partitions: Partition, asked: JobRequest = ASKED, gpus: bool = True, preemptible: tuple[str, ...] = ()
) -> str:
    return choose_partition(asked, partitions, FREE + BUSY + BARE, preemptible, gpus)[0][0].partition.name


def test_gpus_come_first_and_are_left_alone_by_a_run_on_cpus() -> None:
    partitions = (partition("bare", "123", default=True), partition("busy", "xyz"))
    assert first(*partitions) == "busy"
    assert first(*partitions, gpus=False) == "bare"


def test_a_start_at_once_before_the_rest() -> None:
    partitions = (partition("busy", "xyz", default=True), partition("free"))
    assert first(*partitions, preemptible=("free",)) == "free"


def test_then_no_preemption_then_more_nodes_then_the_default_then_the_tightest_limit() -> None:
    assert first(partition("b", default=True), partition("a"), preemptible=("b",)) == "a"
    assert first(partition("two", "ab", default=True), partition("three"), asked=replace(ASKED, nodes_max=3)) == "three"
    assert first(partition("two", "ab", default=True), partition("three")) == "two"
    assert first(partition("long", limit_h=None), partition("short", limit_h=2), partition("mid")) == "short"


def test_a_job_without_a_time_takes_the_longest_limit() -> None:
    """The shortest queue of a site is for tests: the run would come back to it all day."""
    anything = replace(ASKED, time_s=None)
    assert first(partition("debug", limit_h=1), partition("long", limit_h=48), asked=anything) == "long"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"state": "DOWN"}, "is down"),
        ({"max_nodes": 1}, "allowed: 1 to 1 for one job"),
        ({"time_limit_s": 60}, "cluster.time: found 01:00:00; allowed: up to 00:01:00"),
        ({"allow_accounts": ("physics",)}, "cluster.account: found 'chem'"),
        ({"deny_qos": ("long",)}, "cluster.qos: found 'long'"),
        ({"needs_reservation": True}, "takes only jobs that have one"),
    ],
)
def test_a_partition_that_does_not_take_the_job_is_out_with_its_reason(more: dict[str, object], words: str) -> None:
    asked = replace(ASKED, account="chem", qos="long")
    ranked, refused = choose_partition(asked, [partition("p", **more), partition("q")], FREE, (), True)
    assert [fit.partition.name for fit in ranked] == ["q"]
    assert len(refused) == 1
    assert words in refused[0]


def test_free_nodes_of_each_kind_have_to_be_enough() -> None:
    nodes = [node("a", features=("a100",)), node("b", "ALLOCATED", features=("v100",)), node("c", features=("v100",))]
    asked = replace(ASKED, kinds=(("a100", 1), ("v100", 1)))
    assert choose_partition(asked, [partition("p")], nodes, (), True)[0][0].starts_now
    asked = replace(ASKED, nodes_min=3, nodes_max=3, kinds=(("a100", 1), ("v100", 2)))
    assert not choose_partition(asked, [partition("p")], nodes, (), True)[0][0].starts_now


def test_a_node_promised_to_another_job_is_not_free() -> None:
    assert node("a").is_free
    for state in ("IDLE+PLANNED", "IDLE+RESERVED", "IDLE+DRAIN", "ALLOCATED", "MIXED"):
        assert not node("a", state).is_free


def test_what_no_node_has_is_told_with_what_there_is() -> None:
    nodes = [node("a", features=("ada", "big")), node("b", features=("ada",)), node("c")]
    asked = replace(ASKED, partition="p", kinds=(("ada&big", 2),))
    (line,) = check_request(asked, [partition("p")], nodes)
    assert "found 'ada&big' for 2 nodes; 1 of the 3 nodes of partition 'p' have it; features there: ada, big" in line
    typed = replace(ASKED, partition="p", gpus_per_node=1, gpu_type="h100")
    (line,) = check_request(typed, [replace(partition("p"), gres=nodes[0].gres)], nodes)
    assert line == "cluster.gpu_type: found 'h100'; allowed in partition 'p': a100"


NAMES = st.lists(st.sampled_from(["a100", "v100", "big", "ib"]), min_size=1, max_size=4, unique=True)


@given(asked=NAMES, there=NAMES)
def test_and_wants_all_or_wants_one(asked: list[str], there: list[str]) -> None:
    assert has_features("&".join(asked), there) == (set(asked) <= set(there))
    if len(asked) > 1:
        assert has_features("|".join(asked), there) == bool(set(asked) & set(there))


@pytest.mark.parametrize("constraint", ["[a*2&b*1]", "(a|b)&c", "a|b&c", "[a|b]", "a*2"])
def test_forms_that_only_slurm_can_tell(constraint: str) -> None:
    assert has_features(constraint, ["a", "b", "c"]) is None


def test_kinds_become_one_constraint_with_counts() -> None:
    assert constraint_of_groups([("a100", 2), ("v100&big", 1)]) == "[a100*2&(v100&big)*1]"
