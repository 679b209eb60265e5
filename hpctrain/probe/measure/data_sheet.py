"""Peak speeds of GPUs from their vendors' data sheets, by the name that CUDA reports."""

from __future__ import annotations

import re

PEAK_FLOPS = {
    "T4": 65e12,
    "V100": 125e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A30": 165e12,
    "L4": 121e12,
    "L40S": 362e12,
    "L40": 181e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "MI250X": 383e12,
    "MI300X": 1307e12,
}
"""FLOP/s of dense 16-bit matrix products with sums in fp32. A name stands behind the names that contain it."""


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of a GPU in 16-bit products, dense; None if its data sheet is not in the table.

    Args:
        name: the name that CUDA reports, as 'NVIDIA H100 80GB HBM3' or 'AMD Instinct MI300X'.
    """
    words = re.sub(r"[-_]", " ", name)
    for key, flops in PEAK_FLOPS.items():
        if all(re.search(rf"\b{word}\b", words, re.IGNORECASE) for word in key.split()):
            return flops
    return None
