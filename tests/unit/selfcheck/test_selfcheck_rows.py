"""What the selfcheck runs on which machine, and what it makes of a topology's figures."""

from __future__ import annotations

import pytest

from hpctrain.probe.measure.data_sheet import peak_flops
from hpctrain.records.history.selfcheck import PathResult
from hpctrain.records.topology.evidence import PcieLink
from hpctrain.records.topology.link import BackendFigures, LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology
from hpctrain.selfcheck.figures import rows_of
from hpctrain.selfcheck.paths import CheckedPath, LeftOut, paths_of


def paths(gpus: int, compiles: bool = True) -> dict[str, CheckedPath | LeftOut]:
    return {path.name: path for path in paths_of(gpus, compiles)}


def test_every_machine_has_the_same_rows() -> None:
    one_gpu = set(paths(1)) - {"train, one GPU"}
    assert set(paths(0)) == set(paths(0, False)) == one_gpu
    assert set(paths(2)) == set(paths(8)) == set(paths(1))


def test_without_gpus_all_runs_on_the_cpu_and_nccl_is_left_out() -> None:
    cpu = paths(0)
    assert {path.device for path in cpu.values() if isinstance(path, CheckedPath)} == {"cpu"}
    left = {name: path.reason for name, path in cpu.items() if isinstance(path, LeftOut)}
    assert left == {"NCCL, one GPU": "no GPU", "NCCL between GPUs": "no GPU"}


def test_with_one_gpu_several_ranks_use_gloo_and_nccl_has_one() -> None:
    one = paths(1)
    assert one["NCCL between GPUs"] == LeftOut("NCCL between GPUs", "one device")
    by_device = {(path.device, path.world) for path in one.values() if isinstance(path, CheckedPath)}
    assert by_device == {("cuda", 1), ("cpu", 1), ("cpu", 2)}
    nccl = one["NCCL, one GPU"]
    assert isinstance(nccl, CheckedPath)
    assert (nccl.device, nccl.world) == ("cuda", 1)


@pytest.mark.parametrize("gpus", [2, 8])
def test_with_more_gpus_plans_and_nccl_span_them(gpus: int) -> None:
    made = paths(gpus)
    for name in ("ZeRO 3, dp 2", "pipeline, pp 2", "tensor, tp 2"):
        path = made[name]
        assert isinstance(path, CheckedPath)
        assert path.devices() == ["local0:cuda0", "local0:cuda1"]
        assert path.degrees is not None
        assert path.degrees.plan(path.devices()).world_size == 2
    between = made["NCCL between GPUs"]
    assert isinstance(between, CheckedPath)
    assert between.world == gpus


def test_compile_is_left_out_without_a_compiler() -> None:
    assert paths(0, False)["compile"] == LeftOut("compile", "torch has no compiler for the CPU here")


GPU = Device(
    id="cuda0", type="h100", flops={"fp32": 5e13, "bf16": 7e14}, memory_bytes_per_s=2.5e12, launch_s=4e-6,
    driver="580.1", ecc_errors=0, pcie=PcieLink(generation=5, width=16, generation_max=5, width_max=16),
    host_to_device_bytes_per_s=5e10, device_to_host_bytes_per_s=5.1e10, copy_bytes_per_s={"cuda1": 3e11},
)  # fmt: skip


def rows(*devices: Device, **fabric: object) -> dict[str, PathResult]:
    topology = Topology(
        provenance=Provenance(version="0", created="", transport="tcp"),
        device_types={
            "h100": DeviceType(kind="cuda", name="NVIDIA H100 80GB HBM3"), "cpu": DeviceType(kind="cpu", name="CPU"),
        },
        nodes=[Node(id="n0", addr="127.0.0.1", devices=list(devices))],
        fabric=Fabric.model_validate(fabric),
    )  # fmt: skip
    return {row.path: row for row in rows_of(topology)}


def test_a_healthy_gpu_is_told_with_its_share_of_the_data_sheet() -> None:
    made = rows(GPU)
    assert {row.verdict for row in made.values()} == {"ok", "left out"}
    assert made["products, cuda0"].figure == "bf16 700 TFLOP/s, fp32 50 TFLOP/s: 71% of the data sheet"
    assert made["NVML, cuda0"].figure == "driver 580.1, PCIe 5 x16, 0 ECC errors, not throttled"
    assert made["copies between devices"].figure == "one device"
    assert all(row.next_step == "" for row in made.values())


@pytest.mark.parametrize(
    ("changes", "path", "verdict"),
    [
        ({"flops": {"bf16": 3e14}}, "products, cuda0", "slow"),
        ({"throttle_reasons": ["hw_slowdown"]}, "NVML, cuda0", "slow"),
        ({"ecc_errors": 3}, "NVML, cuda0", "failed"),
        ({"xid": 79}, "NVML, cuda0", "failed"),
    ],
)
def test_a_faulty_gpu_has_its_verdict_and_a_next_step(changes: dict[str, object], path: str, verdict: str) -> None:
    row = rows(GPU.model_copy(update=changes))[path]
    assert row.verdict == verdict
    assert row.next_step


def test_a_copy_that_arrives_wrong_is_a_failure() -> None:
    other = GPU.model_copy(update={"id": "cuda1", "copy_bytes_per_s": {}})
    row = rows(GPU, other)["copies between devices"]
    assert (row.verdict, row.figure) == ("failed", "other bytes arrived: cuda1 to cuda0")
    both = GPU.model_copy(update={"id": "cuda1", "copy_bytes_per_s": {"cuda0": 1e11}})
    assert rows(GPU, both)["copies between devices"].figure == "median 200 GB/s"


def test_messages_between_nodes_have_a_row_for_each_backend() -> None:
    nccl = BackendFigures(alpha_s=2e-5, beta_s_per_byte=5e-11, network="IB")
    kind = LinkClass(id="c0", pairs=1, alpha_s=1e-5, beta_s_per_byte=1e-10, backend={"nccl": nccl})
    made = rows(Device(id="cpu0", type="cpu"), classes=[kind])
    assert made["nccl between nodes"].figure == "start-up 20 us, then 20 GB/s over IB"


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("AMD Instinct MI300X", 1307e12),
        ("AMD EPYC 7763", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_are_known_by_cudas_names(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops
