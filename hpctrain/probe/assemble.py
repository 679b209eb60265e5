"""From a probe's outcome to a topology, pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.probe.campaign import tree_of
from hpctrain.probe.classes import fabric_of
from hpctrain.probe.clusters import SwitchTree
from hpctrain.probe.contention import oversubscription
from hpctrain.probe.figures import fit_alpha_beta
from hpctrain.probe.outcome import EVERY_LINK_UP_TO, Joined, Outcome, PairResult
from hpctrain.probe.settings import ProbeSettings
from hpctrain.probe.verdict import find_faults, node_healths, overall
from hpctrain.records.topology import DeviceType, Link, LinkFigures, Node, Provenance, Topology


def assemble(
    outcome: Outcome, settings: ProbeSettings, wall: float, job_id: str | None = None, partial: bool = False
) -> Topology:
    """The topology that was measured, with the verdict.

    Args:
        wall: seconds since 1970, for the provenance.
        job_id: Slurm job that measured.
        partial: the probe goes on: switches are not looked for yet.
    """
    matrix = outcome.matrix()
    tree = SwitchTree() if partial else tree_of(outcome, settings)
    ratios = oversubscription(tree, matrix.index, outcome.contention)
    bare = [_node(name, outcome) for name in outcome.nodes]
    types = _device_types(outcome)
    faults = find_faults(outcome, bare, types, tree, ratios, settings)
    healths = node_healths(outcome, faults)
    links = _links(outcome.pairs, outcome.nodes)
    made = Topology(
        provenance=_provenance(outcome, settings, wall, job_id),
        device_types=types,
        nodes=[node.model_copy(update={"health": healths[node.id]}) for node in bare],
        fabric=fabric_of(matrix, tree, ratios, links, settings),
        verdict=overall(outcome, healths, faults, bare, settings.loopback),
    )
    return made if len(outcome.nodes) <= EVERY_LINK_UP_TO else made.with_pairs(matrix.snapshot())


def _provenance(outcome: Outcome, settings: ProbeSettings, wall: float, job_id: str | None) -> Provenance:
    return Provenance(
        version=__version__,
        created=utc_text(wall),
        transport="tcp",
        loopback=settings.loopback,
        mode=settings.mode,
        seed=settings.seed,
        rounds_done=outcome.rounds_done,
        rounds_planned=outcome.rounds_planned,
        wall_s=round(outcome.wall_s, 3),
        job_id=job_id,
    )


def _node(name: str, outcome: Outcome) -> Node:
    place = outcome.joined.get(name, Joined(addr="", port=0, iface=None, host=None))
    report = outcome.devices.get(name)
    return Node(
        id=name,
        addr=place.addr,
        iface=place.iface,
        host=place.host,
        devices=report.devices if report else [],
        intra_bytes_per_s=report.intra_bytes_per_s if report else None,
    )


def _device_types(outcome: Outcome) -> dict[str, DeviceType]:
    merged: dict[str, DeviceType] = {}
    for report in outcome.devices.values():
        merged |= report.device_types
    return dict(sorted(merged.items()))


def _links(pairs: Sequence[PairResult], nodes: Sequence[str]) -> list[Link]:
    order = {name: place for place, name in enumerate(nodes)}
    turned = [pair if order[pair.a] < order[pair.b] else pair.turned() for pair in pairs]
    alone = {(pair.a, pair.b): pair for pair in turned if pair.alone}
    loaded = {(pair.a, pair.b): pair for pair in turned if not pair.alone}
    links = []
    for a, b in sorted(alone.keys() | loaded.keys()):
        quiet, busy = alone.get((a, b)) or loaded[a, b], loaded.get((a, b))
        links.append(Link(a=a, b=b, ab=_figures(quiet, busy, True), ba=_figures(quiet, busy, False)))
    return links


def _figures(quiet: PairResult, busy: PairResult | None, forward: bool) -> LinkFigures:
    """One direction: latency as its sender saw it, bandwidth as its receiver timed it.

    Beta comes from the loaded bandwidth where there is one: in a training step all nodes talk at once.
    """
    sender, receiver = (quiet.at_a, quiet.at_b) if forward else (quiet.at_b, quiet.at_a)
    under_load = None if busy is None else (busy.at_b if forward else busy.at_a)
    rate = under_load.bytes_per_s if under_load else receiver.bytes_per_s
    # The line goes through a ping and through one second's worth of bytes. A ping counts as no bytes: its 8 are lost in
    # the headers of its packet, and on a slow link their share would make alpha negative.
    alpha, beta = fit_alpha_beta([(0.0, sender.latency.p50), (rate, sender.latency.p50 + 1.0)])
    return LinkFigures(
        latency_s=sender.latency,
        isolated_bytes_per_s=receiver.bytes_per_s,
        loaded_bytes_per_s=under_load.bytes_per_s if under_load else None,
        concurrency=quiet.concurrency,
        alpha_s=alpha,
        beta_s_per_byte=beta,
        n=receiver.n,
    )
