"""The planner works from the measured sizes of a model that hpctrain did not write."""

from __future__ import annotations

import pytest

from hpctrain.base.errors import InputError
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.cost.memory import HEAP_RETAINED_COPIES, MemoryModel, RankRole
from hpctrain.planner.cost.workload import workload_of
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.model.measured_stack import PartSizes
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

SPEC = ImportedSpec(
    factory="net:make", front=["embed"], blocks="layers", back=["head"], seq_len=64, tokens=300, vocab=300, layers=6,
    dim=64, weights_sha256="0" * 64, split_parameters=40_000, split_activation_bytes=300_000,
    tensor_parallel={"up": "columns", "down": "rows"}, tensor_parallel_degrees=[2],
    front_sizes=PartSizes(parameters=20_000, flops=0, activation_bytes=0),
    block_sizes=PartSizes(parameters=50_000, flops=6_400_000, activation_bytes=400_000),
    back_sizes=PartSizes(parameters=19_200, flops=2_500_000, activation_bytes=16_000),
)  # fmt: skip


def topology(count: int) -> Topology:
    device = Device(id="cpu0", type="cpu", flops={"fp32": 1e9}, memory_bytes=4e9, memory_bytes_per_s=5e9, launch_s=2e-7)
    return Topology(
        provenance=Provenance(version="0", created="2099-01-01T00:00:00Z", transport="tcp", loopback=True),
        device_types={"cpu": DeviceType(kind="cpu", name="cpu")},
        nodes=[Node(id=f"local{i}", addr="127.0.0.1", devices=[device]) for i in range(count)],
        fabric=Fabric(classes=[LinkClass(id="loopback", alpha_s=4e-5, beta_s_per_byte=5e-10, pairs=6)]),
    )


def run(**parallel: object) -> Run:
    return Run.model_validate(
        {
            "steps": 1,
            "model": {"import": "net:make"},
            "data": {"train": ["d"], "seq_len": 64},
            "batch": {"global": 8},
            "parallel": {"mode": "fixed", **parallel} if parallel else {"mode": "auto"},
            "recovery": {"memory": "off"},
        }
    )


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}, {"dp": 2}, {}])
def test_it_is_cut_into_its_blocks(degrees: dict[str, int]) -> None:
    plan = make_plan(run(**degrees), SPEC, topology(2))
    assert plan.layers == 6
    assert plan.sequences == 8
    assert plan.predicted is not None
    assert plan.predicted.bound_s is not None
    assert 0 < plan.predicted.bound_s <= plan.predicted.step_time_s["total"]
    for name, degree in degrees.items():
        assert getattr(plan, name) == degree


def test_memory_counts_what_was_measured() -> None:
    small = make_plan(run(pp=1), SPEC, topology(1))
    heavy = SPEC.model_copy(update={"block_sizes": SPEC.block_sizes.model_copy(update={"parameters": 1_050_000})})
    large = make_plan(run(pp=1), heavy, topology(1))
    assert small.predicted is not None
    assert large.predicted is not None
    (less,), (more,) = small.predicted.memory_bytes.values(), large.predicted.memory_bytes.values()
    # Weight, gradient, two moments, and weight and moments again while a checkpoint is written.
    assert more - less == pytest.approx(6 * 1_000_000 * 28)


def test_a_degree_that_was_not_seen_to_be_right_is_declined_with_the_reason() -> None:
    with pytest.raises(InputError, match="a block was seen to be right on 2 devices only"):
        make_plan(run(tp=3), SPEC, topology(3))
    undeclared = SPEC.model_copy(update={"tensor_parallel": {}, "tensor_parallel_degrees": []})
    with pytest.raises(InputError, match=r"model\.tensor_parallel does not say how"):
        make_plan(run(tp=2), undeclared, topology(2))


@pytest.mark.parametrize("solver", ["auto", "paper"])
def test_a_shared_weight_keeps_the_model_in_one_stage(solver: str) -> None:
    tied = SPEC.model_copy(update={"tied": True})
    plan = make_plan(run(), tied, topology(2), PlanRequest(solver=solver))  # type: ignore[arg-type]
    assert len(plan.stages) == 1
    for fixed in ({"pp": 2}, {"pp": 1, "schedule": "zbv"}):  # a V has two stages on one rank
        with pytest.raises(InputError, match="share a weight, which cannot lie in two stages"):
            make_plan(run(**fixed), tied, topology(2))


@pytest.mark.parametrize(
    ("precision", "zero", "live", "each"),
    [
        # Each parameter: 28 bytes of state (weight, gradient, two moments, three for a checkpoint), or a part of them.
        ("fp32", 0, 1, 28),
        ("bf16", 0, 1, 28 + 2),
        ("bf16", 0, 2, 28 + 2 * 2),
        # Gathered in fp32 beside its gradient, and a cast copy for every micro-batch in flight.
        ("fp32", 1, 1, 28 / 2 + 4 + 4),
        ("bf16", 1, 1, 28 / 2 + 4 + 4 + 2),
        ("fp16", 1, 2, 28 / 2 + 4 + 4 + 2 * 2),
        # What autocast keeps outlives the gathered weight that level 3 frees.
        ("fp16", 3, 1, 28 / 2 + 2),
    ],
)
def test_memory_counts_what_weights_are_computed_with(precision: str, zero: int, live: int, each: float) -> None:
    asked = run(dp=2, zero=zero).model_copy(update={"precision": precision})
    role = RankRole("cpu", "gpipe", 1, 0, 1, 2, 1, 2 if zero else 1, 1, live)

    def need(parameters: int) -> float:
        sizes = SPEC.block_sizes.model_copy(update={"parameters": parameters})
        work, _ = workload_of(asked, SPEC.model_copy(update={"block_sizes": sizes}))
        return MemoryModel(work).need(role, (6,))

    # Large blocks, so that the bucket of gradients has its full size in both; buffers of sharding hold pieces.
    found = need(21_000_000) - need(20_000_000)
    pieces = {0: 0, 1: 5 * 4, 3: 5 * 4 + 2 * (4 + 4)}[zero]
    freed = 6 * 4 * HEAP_RETAINED_COPIES["cpu"][zero] if zero else 0
    assert found == pytest.approx(1_000_000 * (6 * each + pieces + freed))
