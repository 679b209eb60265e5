"""What is known of GPUs by their names."""

from __future__ import annotations

import pytest

from hpctrain.probe.measure.data_sheet import PEAK_FLOPS, least_memory_bytes, matrix_dtype


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("bf16", "h100 a100 nvidia_a100-sxm4-80gb NVIDIA_H100_80GB_HBM3 a100_3g.20gb gh200 rtx_6000_ada rtx6000ada "
                 "rtx_a6000 a6000 rtx3090 geforce_rtx_4090 l40s L4 a10g mi250x mi300a rtx_pro_6000"),
        ("fp16", "v100 v100l tesla_v100-sxm2-32gb t4 2080ti rtx2080ti quadro_rtx_6000 rtx8000 titan_rtx titanv mi100"),
        ("fp32", "p100 tesla_p100-pcie-16gb gtx1080ti gtx_1080_ti titan_xp k80"),
        (None, "gpu tesla node100 max1100 3g.40gb large a xa100 a1000000"),
    ],
)  # fmt: skip
def test_the_precision_of_a_gpu_follows_from_its_name(dtype: str | None, names: str) -> None:
    assert {name: matrix_dtype(name) for name in names.split()} == dict.fromkeys(names.split(), dtype)


def test_every_gpu_with_a_peak_has_a_precision() -> None:
    assert [name for name in PEAK_FLOPS if matrix_dtype(name) is None] == []


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("a100", 40),
        ("nvidia_a100-sxm4-80gb", 80),
        ("a100_3g.20gb", 20),
        ("NVIDIA H100 80GB HBM3", 80),
        ("tesla_v100-sxm2-32gb", 32),
        ("gh200", 96),
        ("gpu", None),
    ],
)
def test_the_memory_of_a_gpu_is_the_least_that_its_name_allows(name: str, gib: int | None) -> None:
    assert least_memory_bytes(name) == (None if gib is None else gib * 2**30)
