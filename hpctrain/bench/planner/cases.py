"""Devices and models whose searches are timed: equal GPUs, two kinds of GPUs, and those of the paper."""

from __future__ import annotations

from typing import NamedTuple

from hpctrain import __version__
from hpctrain.base.package_data import package_data_path
from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import LinkClass
from hpctrain.records.topology.topology import Device, DeviceType, Fabric, Node, Provenance, Topology

MODELS = {
    "125M": {"layers": 12, "dim": 768, "heads": 12, "vocab": 32000},
    "350M": {"layers": 24, "dim": 1024, "heads": 16, "vocab": 32000},
    "1.3B": {"layers": 24, "dim": 2048, "heads": 16, "vocab": 32000},
    "7B": {"layers": 32, "dim": 4096, "heads": 32, "vocab": 32000},
}
PAPER = "paper-32-gpu.json"
"""The topology file of the paper's GPUs."""


class SearchCase(NamedTuple):
    """A search that is timed; `name` selects it on the command line."""

    machines: str
    """Kind of the devices: equal; unlike (every second node has slower GPUs); or paper."""
    gpus: int
    model: str

    @property
    def name(self) -> str:
        return f"{self.machines}-{self.gpus}-{self.model}"


SIZES = (8, 32, 256, 1024, 10_000)
"""Numbers of equal GPUs whose 7B searches make up `search_time_s` of the record."""
CASES = (
    *(SearchCase("equal", gpus, "7B") for gpus in SIZES),
    *(SearchCase("equal", 32, model) for model in ("350M", "1.3B")),
    *(SearchCase("unlike", 32, model) for model in ("350M", "1.3B")),
    *(SearchCase("unlike", gpus, "7B") for gpus in (16, 32, 256, 1024, 10_000)),
    *(SearchCase("paper", 32, model) for model in MODELS),
)
"""All cases. Cases with equal kinds of devices and equal models are in order of size."""


def scene_of_case(case: SearchCase) -> tuple[Run, Topology]:
    """Return the run and the topology of a case."""
    if case.machines == "paper":
        topology = Topology.model_validate_json(package_data_path("topology", PAPER).read_text())
        return _run(case.model, 512, "fp16"), topology
    run = _run(case.model, 1024 if case.model == "7B" else 512, "bf16")
    return run, gpus_of(case.gpus, unlike=case.machines == "unlike")


def _run(model: str, rows: int, precision: str) -> Run:
    return Run.model_validate(
        {
            "steps": 1,
            "precision": precision,
            "model": {"dims": MODELS[model]},
            "data": {"train": ["data"], "seq_len": 2048},
            "batch": {"global": rows},
        }
    )


def gpus_of(count: int, unlike: bool = False) -> Topology:
    """Return a topology of `count` A100-like GPUs, eight a node; if `unlike`, every second node has 100 TFLOP/s and 32
    GB."""
    fast = Device(
        id="cuda0", type="type0", flops={"bf16": 2.5e14}, memory_bytes=80e9, memory_bytes_per_s=1.6e12, launch_s=6e-6
    )
    slow = fast.model_copy(update={"type": "type1", "flops": {"bf16": 1e14}, "memory_bytes": 32e9})
    nodes = [
        Node(
            id=f"node{number}", addr="", intra_bytes_per_s=2.3e11,
            devices=[
                (slow if unlike and number % 2 else fast).model_copy(update={"id": f"cuda{index}"})
                for index in range(8)
            ],
        )
        for number in range(count // 8)
    ]  # fmt: skip
    return published(nodes, "cuda", alpha_s=1e-5, bytes_per_s=1e11)


def published(nodes: list[Node], kind: str, alpha_s: float, bytes_per_s: float) -> Topology:
    """Return a topology of these nodes in which all links are equal."""
    types = {device.type for node in nodes for device in node.devices}
    return Topology(
        provenance=Provenance(version=__version__, created="", transport="tcp", mode="published"),
        device_types={name: DeviceType(kind=kind, name=name) for name in types},
        nodes=nodes,
        fabric=Fabric(classes=[LinkClass(id="all", alpha_s=alpha_s, beta_s_per_byte=1 / bytes_per_s, pairs=0)]),
    )
