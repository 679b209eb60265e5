"""Figures of GPUs from their vendors' data sheets, by name: peak speed, memory, precision of fast matrix products."""

from __future__ import annotations

import re
from typing import Literal

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
    "MI250X": 191.5e12,
    "MI300X": 1307e12,
}
"""FLOP/s of dense 16-bit matrix products with sums in fp32; of MI250X, of one of its two devices. A name comes after
the names that contain it."""


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of a GPU in 16-bit products, dense; None if its data sheet is not in the table.

    Args:
        name: the name that torch reports, as 'NVIDIA H100 80GB HBM3' or 'AMD Instinct MI300X'.
    """
    words = re.sub(r"[-_]", " ", name)
    for key, flops in PEAK_FLOPS.items():
        if all(re.search(rf"\b{word}\b", words, re.IGNORECASE) for word in key.split()):
            return flops
    return None


_BESIDE_MODEL = re.compile(r"NVIDIA|AMD|TESLA|GEFORCE|INSTINCT|GPU|SXM\d?|PCIE|NVL|HBM\d?E?|\d{2,3}GB?", re.ASCII)


def is_gpu_name(text: str) -> bool:
    """Whether a text is the name of one GPU of the table `PEAK_FLOPS`, with nothing else than vendor, form factor and
    size of its memory: true for 'a100' and 'nvidia_a100-sxm4-80gb', false for 'rack-a10'.
    """
    models = [word for word in re.split(r"[-_.:\s]+", text.upper()) if not _BESIDE_MODEL.fullmatch(word)]
    return len(models) == 1 and models[0] in PEAK_FLOPS


LEAST_MEMORY_GIB = {
    "T4": 16, "V100": 16, "A100": 40, "A800": 40, "A40": 48, "A10G": 24, "A10": 24, "A30": 24, "L4": 24, "L40S": 48,
    "L40": 48, "H100": 80, "H800": 80, "H200": 141, "GH200": 96, "B200": 180, "MI250X": 64, "MI300X": 192,
}  # fmt: skip
"""GiB of memory of the smallest variant of each GPU; of MI250X, of one of its two devices."""
_GIB = re.compile(r"(?<![0-9.])(\d{1,3}) ?gb\b")


def least_memory_bytes(name: str) -> int | None:
    """Return the memory of a GPU in bytes: the size in its name ('a100_80gb', and of a MIG slice 'a100_3g.20gb'), else
    that of the smallest variant. None if neither is known."""
    words = re.sub(r"[-_.]", " ", name.lower())
    size = _GIB.search(words)
    if size:
        return int(size[1]) * 2**30
    sizes = [gib for key, gib in LEAST_MEMORY_GIB.items() if re.search(rf"\b{key.lower()}\b", words)]
    return sizes[0] * 2**30 if sizes else None


_DTYPES: tuple[tuple[Literal["bf16", "fp16", "fp32"], str], ...] = (
    # compute capability 8.0 and later (Ampere, Ada, Hopper, Blackwell); CDNA 2 and later
    ("bf16", r"[ah]800|[ahb]100|[hb]200|b300|g[hb][23]00|h20|a(2|10|10g|16|30|40)|l4|l40s?|(rtx )?a[2456][05]00"),
    ("bf16", r"(rtx )?[2-6]000 ?ada|(rtx )?[345]0[6-9]0( ?ti)?|rtx pro \d000|mi(210|250x?|3\d\d[ax]?)"),
    # compute capability 7.0 and 7.5 (Volta, Turing); CDNA 1 and Vega 20, whose bf16 is slower
    ("fp16", r"v100[a-z]?|t4|titan ?(v|rtx)|(rtx )?20[6-8]0( ?(ti|super))?|(quadro )?rtx [4568]000|mi(50|60|100)"),
    # older ones, without matrix units
    ("fp32", r"p(100|40|4)[a-z]?|(gtx )?10[5-8]0( ?ti)?|titan ?(x|xp)|k(20|40|80)[a-z]*|m(10|40|60)"),
)
"""(precision, names in lower case with a blank for each `-` and `_`). A name that two GPUs have, such as RTX 6000, is
in the line of the older GPU, whose precision the newer one has too."""


def matrix_dtype(name: str) -> Literal["bf16", "fp16", "fp32"] | None:
    """Return the best precision in which a GPU has fast matrix products: bf16, or fp16 on GPUs without fast bf16, or
    fp32 on GPUs with neither. None if the table has no GPU of this name.

    Args:
        name: the name that CUDA reports, or the type or feature by which a cluster names the GPU: 'NVIDIA H100 80GB
            HBM3', 'a100-sxm4-80gb', 'rtx2080ti'.
    """
    words = re.sub(r"[-_.:\s]+", " ", name.lower())
    words = re.sub(r"\b(rtx|gtx|titan)(?=\d|pro|a\d)", r"\1 ", words)
    for dtype, names in _DTYPES:
        if re.search(rf"(?<![a-z0-9])(tesla )?(?:{names})(?![a-z0-9])", words):
            return dtype
    return None
