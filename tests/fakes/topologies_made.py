"""Topologies and run files made by hand, small enough to reason about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.records.run.run import Run
from hpctrain.records.topology.link import Link, LinkClass, LinkFigures
from hpctrain.records.topology.topology import (  # fmt: skip
    Device,
    DeviceType,
    Fabric,
    Node,
    NodeCluster,
    Provenance,
    Topology,
    Verdict,
)


def topology_of(
    speeds: Sequence[float] = (1.0, 1.0),
    devices: int = 1,
    kind: str = "cpu",
    flops: float = 1e11,
    memory: float | None = 8e9,
    links: dict[tuple[int, int], tuple[float, float]] | None = None,
    default: tuple[float, float] = (5e-5, 1e-9),
    exclude: Sequence[str] = (),
    racks: dict[tuple[int, ...], float] | None = None,
    rails: int = 0,
    **fields: Any,
) -> Topology:
    """Nodes local0, … with the given relative speeds; links are (alpha, beta), the same in both directions. Racks are
    the numbers of their nodes -> oversubscription of their uplink; with rails, devices share so many cards."""
    figures = {"memory_bytes": memory, "launch_s": 1e-6, **fields}
    nodes = [
        Node(
            id=f"local{number}",
            addr=f"10.0.0.{number}",
            devices=[
                Device(
                    id=f"{kind}{index}",
                    type=f"type{speed}",
                    flops={"fp32": flops * speed},
                    memory_bytes_per_s=1e10 * speed,
                    nic=f"eth{index % rails}" if rails else None,
                    **figures,
                )
                for index in range(devices)
            ],
        )
        for number, speed in enumerate(speeds)
    ]
    named = {pair: LinkFigures(alpha_s=alpha, beta_s_per_byte=beta) for pair, (alpha, beta) in (links or {}).items()}
    return Topology(
        provenance=Provenance(version="0", created="2026-01-01T00:00:00Z", transport="tcp"),
        device_types={f"type{speed}": DeviceType(kind=kind, name="made by hand") for speed in speeds},
        nodes=nodes,
        fabric=Fabric(
            classes=[LinkClass(id="all", alpha_s=default[0], beta_s_per_byte=default[1], pairs=1)],
            links=[Link(a=f"local{a}", b=f"local{b}", ab=cost, ba=cost) for (a, b), cost in named.items()],
            clusters=[
                NodeCluster(id=f"rack{number}", members=[f"local{node}" for node in nodes], oversubscription=ratio)
                for number, (nodes, ratio) in enumerate((racks or {}).items())
            ],
        ),
        verdict=Verdict(exclude=list(exclude)),
    )


def run_of(rows: int = 16, seq_len: int = 64, **fields: Any) -> Run:
    """A small model with a settled vocabulary, whose state ends with its workers."""
    dims = {"layers": 6, "dim": 128, "heads": 4, "vocab": 512} | fields.pop("dims", {})
    values = {"steps": 10, "model": {"dims": dims}, "data": {"train": ["data"], "seq_len": seq_len}}
    return Run.model_validate(values | {"batch": {"global": rows}, "recovery": {"memory": "off"}} | fields)
