"""What a job is billed, and with which GPUs it computes."""

from __future__ import annotations

import pytest
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.jobs.job_price import JobPrice, job_price
from hpctrain.records.run.run import Run
from hpctrain.slurm.billing import billing_rule, billing_units, parse_billing_weights
from hpctrain.slurm.commands import Slurm
from hpctrain.slurm.values import parse_memory

A100 = (("a100", 312e12),)


class Billed(FakeSlurm):
    """A cluster whose partitions have billing weights; its nodes have 4 GPUs of some kind, 16 CPUs and 64,000 MiB."""

    def __init__(self, weights: str = "", flags: str = "", gres: str = "gpu:a100:4", feature: str = "(null)") -> None:
        super().__init__()
        self.select = "SelectTypeParameters = CR_CORE_MEMORY\n"
        self.weights, self.flags, self.gres, self.feature = weights, flags, gres, feature

    def _partition_lines(self) -> list[str]:
        extra = f" TRESBillingWeights={self.weights}" if self.weights else ""
        return [line + extra for line in super()._partition_lines()]

    def _node_lines(self) -> list[str]:
        return [
            line.replace("gpu:a100:4", self.gres).replace(" NodeAddr", f" AvailableFeatures={self.feature} NodeAddr")
            for line in super()._node_lines()
        ]

    def _show(self, argv, what, name):
        done = super()._show(argv, what, name)
        return (
            done if what != "config" else self._reply(argv, f"{done.stdout}PriorityFlags = {self.flags}\n{self.select}")
        )


def price(fake: FakeSlurm, **cluster: object) -> JobPrice | None:
    asked = {"kind": "slurm", "nodes": "2", "partition": "low", "devices_per_node": 4, "exclusive": True, **cluster}
    data = {"steps": 1, "model": {"preset": "tiny-1m"}, "data": {"train": ["/d"]}, "batch": {"global": 8}}
    return job_price(Run.from_json({**data, "cluster": asked}), Slurm(fake).state())


def test_of_whole_nodes_all_gpus_are_billed() -> None:
    assert price(Billed()) == JobPrice(2, 8, 8, A100)
    assert price(Billed(), devices_per_node=1) == JobPrice(2, 8, 2, A100)
    assert price(Billed(), devices_per_node=1, exclusive=False) == JobPrice(2, 2, 2, A100)


@pytest.mark.parametrize(
    ("gres", "feature", "peaks"),
    [
        ("gpu:nvidia_a100-sxm4-80gb:4", "(null)", (("nvidia_a100-sxm4-80gb", 312e12),)),
        ("gpu:4", "ib,h100", (("h100", 989e12),)),
        ("gpu:4", "nvidia_a100-sxm4-80gb,a100", (("nvidia_a100-sxm4-80gb", 312e12),)),
        ("gpu:4", "ib,rack-a10", ()),
        ("gpu:4", "a100,h100", ()),
        ("gpu:4", "(null)", ()),
        ("gpu:a100_1g.10gb:4", "a100", ()),
        ("gpu:a100:4,gpu:a100_3g.20gb:2", "(null)", ()),
        ("gpu:gtx285:4", "(null)", ()),
    ],
)
def test_a_kind_of_gpu_is_known_by_its_type_or_by_a_feature(gres: str, feature: str, peaks: object) -> None:
    found = price(Billed(gres=gres, feature=feature))
    assert found is not None
    assert found.peaks == peaks


@pytest.mark.parametrize(
    ("weights", "flags", "units"),
    [
        ("", "", None),
        ("CPU=1.0,Mem=0.25G,GRES/gpu=16", "", 2 * (16 + 62.5 * 0.25 + 64)),
        ("CPU=1.0,Mem=0.25G,GRES/gpu=16", "MAX_TRES", 2 * 64),
        ("CPU=1.0,Mem=0.25G,GRES/gpu=16", "DEPTH_OBLIVIOUS,MAX_TRES_GRES", 2 * (16 + 64)),
        ("GRES/gpu:a100=10,GRES/gpu:h100=40", "", 2 * 40),
        ("CPU=1,License/matlab=3", "", None),
    ],
)
def test_billing_units_are_those_of_slurm(weights: str, flags: str, units: float | None) -> None:
    found = price(Billed(weights, flags))
    assert found is not None
    assert found.units_per_h == units


def test_memory_that_slurm_does_not_give_out_is_not_billed() -> None:
    """Seen on Slurm 22.05 with CR_CORE: whole nodes of 2 CPUs are billed cpu=4,node=2, without mem."""
    fake = Billed("CPU=2.0,Mem=0.5G,Node=3")
    fake.select = "SelectTypeParameters = CR_CORE\n"
    found = price(fake)
    assert found is not None
    assert found.units_per_h == 2 * (16 * 2.0 + 3)


def test_of_a_part_only_the_part_is_billed() -> None:
    sbatch = ["--cpus-per-task=4", "--mem=16000M"]
    found = price(Billed("CPU=1.0,Mem=1G,GRES/gpu=16"), devices_per_node=1, exclusive=False, sbatch=sbatch)
    assert found is not None
    assert found.units_per_h == 2 * (4 + 15.625 + 16)


@pytest.mark.parametrize(
    ("memory", "mib"),
    [
        (["--mem=16G"], 16384), (["--mem=16gb"], 16384), (["--mem=1T"], 2**20), (["--mem=1025K"], 2),
        (["--mem=500"], 500), (["--mem=0"], 64000), (["--mem-per-cpu=2G"], 4 * 2048), (["--mem-per-gpu=10G"], 10240),
        ([], None), (["--mem=lots"], None), (["--mem-per-cpu=0"], None), (["--mem=1G", "--mem-per-gpu=1G"], None),
    ],
)  # fmt: skip
def test_memory_of_a_part_is_billed_in_any_unit(memory: list[str], mib: int | None) -> None:
    part = {"devices_per_node": 1, "exclusive": False, "sbatch": ["--cpus-per-task=4", *memory]}
    found, without = price(Billed("Mem=1M"), **part), price(Billed("CPU=1"), **part)
    assert found is not None
    assert without is not None
    assert (found.units_per_h, without.units_per_h) == (None if mib is None else 2.0 * mib, 2.0 * 4)


@given(st.text(alphabet="0123456789KMGTBkmgt.- ", max_size=20) | st.text(max_size=20))
def test_any_text_of_memory_is_read(text: str) -> None:
    mib = parse_memory(text)
    assert mib is None or mib >= 0


@given(st.text(alphabet="CPUMemGRES/gpu:a100=,.0123456789GKT ", max_size=60) | st.text(max_size=30))
def test_any_text_of_weights_is_read(text: str) -> None:
    weights = parse_billing_weights(text)
    assert all(value >= 0 for value in weights.values())
    billing_units({"cpu": 1.0, "mem": 1.0}, weights, billing_rule(text))
