"""Figures of GPUs and their links from vendors' data sheets, and the GPUs and rates in the table of published runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

A100_SHARE = 267.9 / 312
"""Share of its data sheet's FLOP/s that an A100 SXM reaches in large bf16 matrix products (Bekman, ml-engineering,
"Maximum Achievable Matmul FLOPS")."""


@dataclass(frozen=True)
class DataSheet:
    """One kind of GPU according to its data sheet, and the share of the sheet's FLOP/s that others measured."""

    half_flops: float
    """Peak FLOP/s of fp16 matrix products, dense, on tensor cores."""
    single_flops: float
    """Peak FLOP/s for fp32 inputs: TF32 on GPUs that have it and where frameworks of the time allowed it, else fp32."""
    memory_bytes: float
    bytes_per_s: float
    """Memory bandwidth in bytes per second."""
    link_bytes_per_s: float
    """Bandwidth to another GPU of the node in one direction, in bytes per second: NVLink, else PCIe."""
    node_bytes_per_s: float = 4 * 25e9
    """Bandwidth of a node whose table row states no network; by default that of four HDR InfiniBand ports."""
    sustained_share: float = A100_SHARE
    """Share of the sheet's FLOP/s in large matrix products alone, as a probe measures it; by default that of an A100,
    where no measurement was published."""


SHEETS = {
    # NVIDIA A100 datasheet: 312 / 156 TFLOP/s, 1.555 and 2.039 TB/s, NVLink 600 GB/s both ways.
    # Of the 80 GB, nvidia-smi shows 81,251 MiB.
    "A100-40": DataSheet(312e12, 156e12, 40e9, 1.555e12, 300e9),
    "A100": DataSheet(312e12, 156e12, 81251 * 2**20, 2.039e12, 300e9),
    # NVIDIA H100 SXM datasheet: 989 / 495 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s both ways.
    # A DGX H100 has eight ports of 400 Gb/s. Shares of H100 and GH200: Bekman, as for the A100.
    "H100": DataSheet(989e12, 495e12, 80e9, 3.35e12, 450e9, 8 * 50e9, sustained_share=792.1 / 989),
    # NVIDIA GH200 datasheet, 96 GB HBM3: 990 / 494 TFLOP/s, 4 TB/s; of four in a node each pair has 150 GB/s.
    "GH-96": DataSheet(990e12, 494e12, 96e9, 4.0e12, 450e9, sustained_share=821.0 / 989),
    # NVIDIA V100 datasheet, SXM2 16 GB: 125 / 15.7 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways. Share: 83 TFLOP/s
    # (Markidis et al. 2018, "NVIDIA Tensor Core Programmability, Performance & Precision").
    "V100": DataSheet(125e12, 15.7e12, 16e9, 900e9, 150e9, sustained_share=83 / 125),
    # NVIDIA T4 datasheet: 65 / 8.1 TFLOP/s, 320 GB/s, PCIe 3.0 x16 32 GB/s both ways.
    "T4": DataSheet(65e12, 8.1e12, 16e9, 320e9, 16e9),
    # NVIDIA Ampere GA102 and Turing TU102 whitepapers, tensor rates with fp32 sums; PCIe 4.0 and 3.0 x16.
    "RTX-3090": DataSheet(71e12, 35.6e12, 24e9, 936e9, 32e9),
    "RTX-2080": DataSheet(53.8e12, 13.4e12, 11e9, 616e9, 16e9),
    "Titan-RTX": DataSheet(130e12, 16.3e12, 24e9, 672e9, 16e9),
}
"""Name of a GPU in the table of runs -> its data sheet."""
OMNI_PATH_BYTES_PER_S = 40.55e9 / 8
"""Rate of a ring through one Omni-Path card of BigScience's nodes: the last four of five all-reduces of 4 GB by 32 GPUs
on 4 nodes, over which NCCL's log shows one card (bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt)."""
TCP_FLOW_BYTES_PER_S = 1.25e9
"""Limit of a single TCP flow between instances of one placement group (10 Gb/s; Amazon EC2 user guide, network
bandwidth). A ring without RDMA reaches no more, whatever the instance's own bandwidth."""
LINK_SHARE = 0.77
"""Share of a stated bandwidth that collectives reach: 230 of NVLink's 300 GB/s between eight A100s (nccl-tests)."""
ALPHA_S = 1e-5
"""Assumed start-up time of a message between nodes; no published figure exists."""


def gpu_of(text: str) -> str | None:
    """Return the name in `SHEETS` for the GPU column of a run's row: '16xT4-16 (4x g4dn.12xlarge)' -> 'T4'. None if
    there is no data sheet of the GPU."""
    for name in sorted(SHEETS, key=len, reverse=True):
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![0-9])", re.sub(r"^\d+x", "", text)):
            return name
    return None


def gpus_of(text: str) -> list[str] | None:
    """Return the name in `SHEETS` of each GPU for the GPU column of a mixed run: '12xV100+4xT4' -> 12 times 'V100',
    then 4 times 'T4'. None if one has no data sheet."""
    found: list[str] = []
    for part in text.split("(")[0].split("+"):
        match = re.match(r"\s*(\d+)x(.+)", part)
        name = gpu_of(match[2]) if match else None
        if match is None or name is None:
            return None
        found += [name] * int(match[1])
    return found


def stated_bytes_per_s(text: str) -> float | None:
    """Return the last 'N Gb/s' or 'NGbps' in a link column of the table as bytes per second; None if there is none.
    'NxName MGb/s' means N links of M Gb/s."""
    found = re.findall(r"(?:(\d+)x[^0-9]*)?([\d.]+)\s*Gb(?:/s|ps)", text)
    if not found:
        return None
    count, rate = found[-1]
    return float(count or 1) * float(rate) * 1e9 / 8


def inter_node_bytes_per_s(text: str) -> float | None:
    """Return the rate that collectives reach between two nodes in bytes per second, by the table's column: for 'Nx
    Omni-Path' N times the measured rate of a card, else `LINK_SHARE` of the stated rate. None if it states none."""
    if cards := re.match(r"(\d+)x Omni-Path", text):
        return int(cards[1]) * OMNI_PATH_BYTES_PER_S
    stated = stated_bytes_per_s(text)
    return None if stated is None else LINK_SHARE * stated


def intra_node_bytes_per_s(text: str) -> float | None:
    """Return the stated rate between two GPUs of a node in bytes per second, by the table's column. None if it states
    none, and for NVLink, whose rate is that of the GPU's data sheet."""
    return None if "NVLink" in text else stated_bytes_per_s(text)


def stated_alpha_s(text: str) -> float | None:
    """Return the first 'Nms' in a link column of the table as seconds; None if there is none."""
    match = re.search(r"([\d.]+)\s*ms\b", text)
    return float(match[1]) / 1e3 if match else None
