"""Conversion between layouts and plans: writes a layout as a plan, and reads a plan back so that it can be predicted
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hpctrain.base.errors import InputError
from hpctrain.planner.cost.memory_options import MemoryOptions, memory_options_of_plan
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import workload_of
from hpctrain.planner.devices.links import Links
from hpctrain.planner.devices.pool import DeviceSpec, make_device_pool
from hpctrain.planner.devices.tensor_parallel_group import Placement, sharing_groups
from hpctrain.planner.layout.layout import Layout
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.codec_spec import CodecSpec
from hpctrain.records.plan.compression import make_codec
from hpctrain.records.plan.gradient_codec import IntraNode, Messages
from hpctrain.records.plan.plan import Plan, Replica, Stage
from hpctrain.records.run.recovery import Recovery
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology, Verdict
from hpctrain.schedule.generate import make_schedule, why_no_schedule


def plan_of_layout(layout: Layout, cost: CostModel, **fields: object) -> Plan:
    """Return the plan of a layout.

    Args:
        cost: the cost model with the formats of activations between nodes.
        fields: the plan's fields that the layout does not decide.
    """
    memory_options = layout.memory_options
    edges = pairwise([0, *accumulate(layout.blocks)])
    values = {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "zero": memory_options.zero,
        "shard": layout.shards if 1 < layout.shards < layout.dp else None,
        "sequence_parallel": memory_options.sequence_parallel,
        "tensor_parallel_sums": cost.work.tensor_parallel_sums if _spans_nodes(layout) else "none",
        "schedule": layout.schedule,
        "stages": [
            Stage(layers=edge, recompute=memory_options.recompute, messages=_messages(cost, layout, stage))
            for stage, edge in enumerate(edges)
        ],
        "replicas": [_replica(layout, replica) for replica in range(layout.dp)],
        "ranks": [device for rank in range(layout.pp) for row in layout.placement for device in row[rank].device_ids],
        "actions": {replica: _actions(layout, replica) for replica in range(layout.dp)},
    }
    return Plan.model_validate(values | fields)


def _spans_nodes(layout: Layout) -> bool:
    return any(unit.spans_nodes for unit in layout.units())


def level_specs(spec: CodecSpec, intra_node: IntraNode, layout: Layout) -> list[CodecSpec]:
    """Return the entries of `compression` in the plan of a layout: one for all replicas alike, or one for each level.

    Args:
        spec: the codec between nodes, or between all replicas.
        intra_node: how the replicas of a node sum gradients first; without effect where the layout has no levels.
    """
    if intra_node == "flat" or layout.level_replicas == 1:
        return [spec]
    within = CodecSpec(level="intra_node", codec=make_codec({"mode": intra_node}))
    return [within, spec.model_copy(update={"level": "inter_node"})]


def _messages(cost: CostModel, layout: Layout, stage: int) -> Messages:
    """Return the codec of the messages from a stage to the next; "none" if no message leaves a node."""
    if stage == len(layout.blocks) - 1:
        return "none"
    hops = [(layout.unit(replica, stage), layout.unit(replica, stage + 1)) for replica in range(layout.dp)]
    codecs = (cost.messages(a, b, stage) for a, b in hops)
    return next((codec for codec in codecs if codec != "none"), "none")


def _replica(layout: Layout, replica: int) -> Replica:
    count = layout.micro_batches[replica]
    return Replica(
        sequences=layout.micro_batch * count,
        micro_batch=layout.micro_batch,
        micro_batches=count,
        devices=[list(layout.unit(replica, stage).device_ids) for stage in range(len(layout.blocks))],
    )


def _actions(layout: Layout, replica: int) -> dict[int, list[str]]:
    table = make_schedule(layout.schedule, layout.pp, len(layout.blocks), layout.micro_batches[replica])
    return dict(enumerate(table.rows()))


@dataclass(frozen=True, eq=False)
class CostedLayout:
    """A layout and the cost model that predicts its step time."""

    cost: CostModel
    layout: Layout


def layout_of_plan(run: Run, spec: Spec, plan: Plan, topology: Topology) -> CostedLayout:
    """Return the plan's layout on the devices of the topology, with the constants that the plan was predicted with.

    Raises:
        InputError: the plan is for other devices or another run, it uses both nodes of a broken link, the topology
            lacks a figure, or an edit of the plan cannot be predicted by the cost model.
    """
    missing = [device_id for device_id in plan.ranks if device_id not in set(topology.device_ids())]
    if missing:
        raise InputError(
            f"plan: ranks: {', '.join(missing[:4])}{' …' * (len(missing) > 4)} not in the topology; give the topology "
            "that the plan was made for with --topology"
        )
    if reason := _why_unknown(plan, run, spec):
        raise InputError(f"plan: {reason}")
    work, _ = workload_of(run, spec)
    memory_options = memory_options_of_plan(plan)
    work = replace(work, memory_options=memory_options, fixed=None, codec=plan.codec, intra_node=plan.intra_node)
    messages = tuple(stage.messages for stage in plan.stages)
    work = replace(work, messages=messages, tensor_parallel_sums=plan.tensor_parallel_sums)
    # The plan states its devices, so spares, excluded nodes and limits on devices do not apply here.
    free = run.model_copy(
        update={
            "recovery": Recovery(),
            "cluster": run.cluster.model_copy(update={"devices_per_node": None, "device": _kind(plan, topology)}),
        }
    )
    pool = make_device_pool(free, topology.only(plan.nodes).model_copy(update={"verdict": Verdict()}), plan.profile)
    devices = {device.device_id: device for device in pool.devices}
    if unusable := [device_id for device_id in plan.ranks if device_id not in devices]:
        raise InputError(f"plan: ranks: {_why_unusable(plan, topology, unusable[0])}; edit the plan, or plan again")
    layout = _layout(plan, devices, pool.links, memory_options)
    if layout.shards != plan.shards:
        raise InputError(
            f"plan: shard: found {plan.shard}; the cost model knows sharding over all replicas and over those of a node"
        )
    work = replace(work, framework=pool.framework)
    return CostedLayout(CostModel(work, pool.links, pool.constants), layout)


def _kind(plan: Plan, topology: Topology) -> str:
    return topology.device_types[topology.device(plan.ranks[0]).type].kind


def _why_unusable(plan: Plan, topology: Topology, device_id: DeviceId) -> str:
    """Return why the planner cannot use a device together with the other devices of the plan, as one clause."""
    kind = topology.device_types[topology.device(device_id).type].kind
    if kind != _kind(plan, topology):
        return f"{device_id} is a {kind} device and {plan.ranks[0]} is none; a plan has devices of one kind"
    others = [node for node in plan.nodes if node != device_id.node]
    for other in others:
        if {(device_id.node, other), (other, device_id.node)} & set(topology.fabric.broken):
            return f"{device_id} and node {other} are both used, but the topology says that their link is broken"
    return f"{device_id} is used, but the topology has no figures of a link between its node and {', '.join(others)}"


def _why_unknown(plan: Plan, run: Run, spec: Spec) -> str | None:
    """Return why the cost model cannot predict the plan, as one clause; None if it can."""
    if plan.layers != spec.layers:
        return f"stages: found {plan.layers} blocks, the run's model has {spec.layers}; give the run file with --run"
    if plan.sequences != run.batch.global_:
        return (
            f"replicas: found {plan.sequences} sequences, batch.global is {run.batch.global_}; "
            "give the run file with --run"
        )
    if len({replica.micro_batch for replica in plan.replicas}) > 1:
        return "replicas: their micro-batches differ in size, which cannot be simulated; give them one size"
    if len({stage.recompute for stage in plan.stages}) > 1:
        return "stages: they differ in recompute, which cannot be simulated; give them one"
    for number, replica in enumerate(plan.replicas):
        stages = len(plan.stages)
        reason = why_no_schedule(plan.schedule, plan.pp, stages, replica.micro_batches)
        if reason:
            return f"{reason}; a table by hand cannot be simulated"
        stated = plan.table(number)
        if stated is not None and stated != make_schedule(plan.schedule, plan.pp, stages, replica.micro_batches):
            return f"actions: those of replica {number} are not those of schedule {plan.schedule}; remove them"
    return None


def _layout(plan: Plan, devices: dict[DeviceId, DeviceSpec], links: Links, memory_options: MemoryOptions) -> Layout:
    groups = dict.fromkeys(tuple(device_ids) for replica in plan.replicas for device_ids in replica.devices)
    made = sharing_groups([tuple(devices[device_id] for device_id in group) for group in groups], links)
    units = dict(zip(groups, made, strict=True))
    layout = Layout(
        placement=Placement(
            tuple(units[row] for row in plan.pipeline_rank_devices(replica)) for replica in range(plan.dp)
        ),
        schedule=plan.schedule,
        micro_batch=plan.replicas[0].micro_batch,
        micro_batches=tuple(replica.micro_batches for replica in plan.replicas),
        blocks=tuple(stage.layers[1] - stage.layers[0] for stage in plan.stages),
        memory_options=memory_options,
    )
    for number, stated in enumerate(plan.replicas):
        if any(
            layout.unit(number, stage).device_ids != tuple(device_ids)
            for stage, device_ids in enumerate(stated.devices)
        ):
            raise InputError(
                f"plan: replicas: the stages of replica {number} do not lie where schedule {plan.schedule} puts them, "
                "which cannot be simulated"
            )
    return layout
