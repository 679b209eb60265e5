"""Describes a published run as the planner sees it: its model, its devices by data sheet, and its plan as a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from hpctrain import __version__
from hpctrain.base.even_parts import even_parts
from hpctrain.planner.cost.memory import MemoryModel
from hpctrain.planner.cost.memory_options import MemoryOptions
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.cost.workload import Workload
from hpctrain.planner.devices.constants import CostConstants, Framework
from hpctrain.planner.devices.links import Links
from hpctrain.planner.devices.pool import DEFAULT_LAUNCH_S, DeviceSpec
from hpctrain.planner.devices.tensor_parallel_group import Placement, TensorParallelGroup
from hpctrain.planner.layout.layout import Layout
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.plan.plan import ParallelDims
from hpctrain.records.topology.link import Link, LinkClass, LinkFigures
from hpctrain.records.topology.link_cost import LinkCost
from hpctrain.records.topology.topology import DeviceType, Fabric, Node, Provenance, Topology
from tools.published_runs.data_sheets import (
    ALPHA_S,
    LINK_SHARE,
    SHEETS,
    TCP_FLOW_BYTES_PER_S,
    gpu_of,
    gpus_of,
    inter_node_bytes_per_s,
    intra_node_bytes_per_s,
    stated_alpha_s,
)
from tools.published_runs.gpt_spec import GptSpec
from tools.published_runs.layer_profile import LayerProfile, ProfiledCostModel
from tools.published_runs.sailor import SailorFigures
from tools.published_runs.table import MeasuredRun

HALF = Framework(
    weight_bytes=2, gradient_bytes=2, state_bytes=12, checkpoint_bytes=0, residual_stream_bytes=2,
    blocking_sends=True, split_sends=True, selective_sends_again=False, process_bytes=5.71e9,
    bucket_bytes=1e9, split_streams=0, early_sums=False,
)  # fmt: skip
"""Megatron in fp16: weights and gradients in fp16, a master copy and moments in fp32 (Rajbhandari et al. 2020).
`process_bytes` (context, communicators, workspaces, allocator cache) is the most that a GH200 of the Sailor runs
held besides tensors. Gradients are summed in DeepSpeed's buckets of 5e8 numbers (DeepSpeed's configuration
reference)."""
DEEPSPEED = replace(HALF, shards_in_place=True, split_outputs=True, gap_share=0.31, process_bytes=5.0e9)
"""Megatron-DeepSpeed in fp16, without `DEEPSPEED_UPDATE_BYTES`. `gap_share` and `process_bytes` are the result of
`fit_memory` on BigScience's runs in fp16. With ZeRO 1 each of n ranks' parts of the gradients is reduced to this rank
by an operation of its own (DeepSpeedZeroOptimizer.average_tensor). A chain through all ranks sends n/(n − 1) times the
bytes of a reduce-scatter."""
DEEPSPEED_UPDATE_BYTES = (8, 6)
"""Bytes per parameter of the buffers in which DeepSpeed's fp16 optimizers prepare an update, in general and with ZeRO
on one replica. Without ZeRO, gradients are cast to fp32 one by one and then in one flat tensor (FP16_Optimizer). With
ZeRO, a rank's part of them is flattened in fp16 and then cast to fp32; but first, each of its gradients is cast to
fp64 for the norm, and of several replicas, the embedding's gradient takes most of a rank's part
(DeepSpeedZeroOptimizer). torch's allocator cannot make such tensors of the small pieces that activations leave."""
BRAIN_HALF = replace(DEEPSPEED, accumulated_bytes=4, sharded_sum_factor=2.0, gather_buffer_bytes=2)
"""Megatron-DeepSpeed in bf16 (DeepSpeed's BF16_Optimizer), whose optimizer adds up gradients in fp32. All of them are
all-reduced in fp32 (PipelineEngine._bf16_reduce_grads), which sends twice the bytes of a reduce-scatter. Its ranks
gather up to 5e9 updated weights at once, for which torch's all-gather into a list has a buffer of all of them."""
SINGLE = replace(HALF, weight_bytes=4, gradient_bytes=4, state_bytes=8, residual_stream_bytes=4)
"""Megatron in fp32: weights, gradients and two moments in fp32."""
FULLY_SHARDED = replace(HALF, weight_bytes=4, gradient_bytes=4, state_bytes=8)
"""Sharding with autocast, as llm-foundry trains with torch's FSDP: weights, gradients and moments in fp32 are sharded,
weights are gathered and computed in bf16. Gradients are summed in `MeasuredRun.reduced_bytes`."""
SENDING_BESIDE = replace(HALF, blocking_sends=False)
"""DT-FM's runtime, which sends and receives beside its computation (Yuan et al. 2022, section 3)."""
WITHOUT_DROPOUT = ("Sailor", "llm-foundry")
"""Families whose runs use no dropout, as in Sailor's scripts and llm-foundry's models. BigScience's job scripts
(bigscience, train/tr11-176B-ml) set no rate of dropout, and Megatron-DeepSpeed's default is 0.1."""
CLASSIFIER_VOCAB = 50257
"""Rows of the embedding of DT-FM's models, whose table states no vocabulary: those of GPT-2."""
BLOCKING = ("BigScience",)
"""Families whose host waited for each kernel before it started the next one (CUDA_LAUNCH_BLOCKING=1, which BigScience
set against hangs; chronicles-prequel.md of BLOOM), so that the times of host and device add up."""
PRE_UNITS = 3
"""Number of AMP's pipeline units before the first block."""


@dataclass(frozen=True, eq=False)
class PublishedScenario:
    """A published run as the cost model sees it, without the constants that are fitted."""

    run: MeasuredRun
    work: Workload
    layout: Layout
    links: Links
    profile: LayerProfile | None
    """Measured layer times of the model; None: the roofline predicts them."""

    def step_s(self, constants: CostConstants) -> float:
        """Return the predicted seconds of a step.

        Args:
            constants: the cost model's constants for GPUs.
        """
        by_kind = {"cuda": replace(constants, overlap_power=1.0) if self.run.family in BLOCKING else constants}
        cost = CostModel(self.work, self.links, by_kind)
        if self.profile is not None:
            cost = ProfiledCostModel(self.work, self.links, by_kind, self.profile, self.layout.micro_batch)
        return predict(cost, self.layout).total

    def slower(self, factor: float) -> PublishedScenario:
        """Return the scenario with devices whose computation takes `factor` times as long. Measured layer times, if
        there are any, stay."""
        placement = Placement(
            tuple(TensorParallelGroup(unit.index, tuple(d.slower(factor) for d in unit.devices)) for unit in row)
            for row in self.layout.placement
        )
        return replace(self, layout=replace(self.layout, placement=placement))

    def memory_bytes(self) -> float:
        """Return the predicted peak memory of the fullest device in bytes. The allocator's gaps count at most up to the
        device's memory, because torch frees its unused segments before an allocation fails."""
        framework = self.work.framework
        process_bytes = framework.process_bytes or 0.0
        peak = min(self.peak_bytes(process_bytes, framework.gap_share), self.device_bytes)
        return max(peak, self.peak_bytes(process_bytes, 0.0))

    def peak_bytes(self, process_bytes: float, gap_share: float) -> float:
        """Return the peak bytes of the fullest device, whatever memory it has, with these figures in place of those of
        the framework."""
        framework = replace(self.work.framework, process_bytes=process_bytes, gap_share=gap_share)
        return max(self.layout.memory(MemoryModel(replace(self.work, framework=framework))).values())

    @property
    def device_bytes(self) -> float:
        """Memory in bytes of the smallest device; infinite if no data sheet states any."""
        units = (unit for row in self.layout.placement for unit in row)
        return min(device.memory_bytes or math.inf for unit in units for device in unit.devices)


def scene_of(run: MeasuredRun, sailor: SailorFigures) -> PublishedScenario | str:
    """Return the run's scenario, or a text with the reason why the cost model cannot describe the run."""
    if run.left_out is not None:
        return run.left_out
    placement = _cells(run)
    if isinstance(placement, str):
        return placement
    blocks = _blocks(run)
    if isinstance(blocks, str):
        return blocks
    if "across" in run.inter_node:
        return f"its network has several rates ({run.inter_node}), and the table does not state where its ranks were"
    if run.rows % (run.dp * run.micro_batch):
        return f"{run.rows} sequences do not go into {run.dp} replicas with micro-batches of {run.micro_batch}"
    zero = run.zero if run.dp > 1 else 0
    memory_options = MemoryOptions(zero, recompute=run.recompute, sequence_parallel=run.sequence_parallel)  # type: ignore[arg-type]
    work = Workload(
        _spec(run), run.rows, run.seq_len, "fp16" if run.half else "fp32", memory_options=memory_options,
        framework=_framework(run),
    )  # fmt: skip
    count = run.rows // (run.dp * run.micro_batch)
    layout = Layout(placement, run.schedule, run.micro_batch, (count,) * run.dp, blocks, memory_options)
    figures = sailor if run.family == "Sailor" else None
    links = Links(LinkCost(_topology(run, placement, figures)))
    scene = PublishedScenario(run, work, layout, links, figures.profiles.get(run.model) if figures else None)
    if run.recompute_stated or scene.memory_bytes() <= scene.device_bytes:
        return scene
    # What the table does not say was necessary: without recomputation, the run would not have fitted.
    memory_options = replace(memory_options, recompute="full")
    return replace(
        scene,
        work=replace(work, memory_options=memory_options),
        layout=replace(layout, memory_options=memory_options),
    )


def _spec(run: MeasuredRun) -> GptSpec:
    return GptSpec(
        layers=run.layers, dim=run.hidden, heads=run.heads, kv_heads=run.kv_heads, ffn_dim=run.ffn,
        vocab=run.vocab or CLASSIFIER_VOCAB, positions=run.seq_len, tied=run.tied and run.vocab is not None,
        dropout=run.family not in WITHOUT_DROPOUT, fused=run.family == "llm-foundry", plain=not run.half,
        gated=run.gated, head=run.vocab is not None,
    )  # fmt: skip


def _framework(run: MeasuredRun) -> Framework:
    if run.zero == 3 and "FSDP" in run.framework:
        return replace(FULLY_SHARDED, gradient_bytes=run.reduced_bytes)
    if "DT-FM runtime" in run.framework:
        return SENDING_BESIDE
    if run.bf16:
        return BRAIN_HALF
    if run.half and "DeepSpeed" in run.framework:
        update_bytes = DEEPSPEED_UPDATE_BYTES[run.zero > 0 and run.dp == 1]
        sum_factor = run.dp / max(run.dp - 1, 1)
        return replace(DEEPSPEED, state_bytes=HALF.state_bytes + update_bytes, sharded_sum_factor=sum_factor)
    return HALF if run.half else SINGLE


def _cells(run: MeasuredRun) -> Placement | str:
    """Return the placement `placement[replica][pipeline rank]`, with ranks in Megatron's order: tp within dp within
    pp. If the run's plan cannot be described, return the reason."""
    if run.stages is not None:
        return _stated_cells(run)
    kinds = gpus_of(run.gpu) if "+" in run.gpu else [gpu_of(run.gpu)] * run.num_gpus
    if kinds is None or None in kinds:
        return f"there is no data sheet of {run.gpu!r}"
    if len(kinds) != run.num_gpus or run.pp * run.dp * run.tp != run.num_gpus:
        return f"{ParallelDims(run.pp, run.dp, run.tp)} is not its {run.num_gpus} GPUs"
    if not run.node_sizes:
        return f"its nodes do not add up to its {run.num_gpus} GPUs: gpus_per_node cannot be read"
    names = [f"node{node}:cuda{index}" for node, size in enumerate(run.node_sizes) for index in range(size)]
    places = [_device_spec(name, str(kind), run.half) for name, kind in zip(names, kinds, strict=True)]

    def unit(replica: int, rank: int) -> TensorParallelGroup:
        first = (rank * run.dp + replica) * run.tp
        return TensorParallelGroup(first, tuple(places[first : first + run.tp]))

    return Placement(tuple(unit(replica, rank) for rank in range(run.pp)) for replica in range(run.dp))


def _stated_cells(run: MeasuredRun) -> Placement | str:
    """Return the placement of a run whose table row states the devices of each stage, or the reason why it cannot be
    described. Each tensor-parallel group is on a node of its own, as in these runs."""
    assert run.stages is not None
    if len({len(stage) for stage in run.stages}) != 1 or len({tp for stage in run.stages for _, tp in stage}) != 1:
        return "its stages differ in replicas or in tensor parallelism, which a plan cannot say"
    unknown = {gpu for stage in run.stages for gpu, _ in stage} - set(SHEETS)
    if unknown:
        return f"there is no data sheet of {', '.join(sorted(unknown))}"
    rows = []
    for replica in range(len(run.stages[0])):
        row = []
        for rank, stage in enumerate(run.stages):
            gpu, tp = stage[replica]
            number = replica * len(run.stages) + rank
            devices = tuple(_device_spec(f"node{number}:cuda{index}", gpu, run.half) for index in range(tp))
            row.append(TensorParallelGroup(number, devices))
        rows.append(tuple(row))
    return Placement(rows)


@lru_cache(maxsize=4096)
def _device_spec(name: str, kind: str, half: bool) -> DeviceSpec:
    sheet = SHEETS[kind]
    flops = sheet.sustained_share * (sheet.half_flops if half else sheet.single_flops)
    launch_s = DEFAULT_LAUNCH_S["cuda"]
    return DeviceSpec(DeviceId(name), "cuda", kind, flops, sheet.memory_bytes, sheet.bytes_per_s, launch_s)


def _blocks(run: MeasuredRun) -> tuple[int, ...] | str:
    """Return the number of blocks of each stage, as the table's row states it, else evenly divided. If the row does
    not fit the model, return the reason."""
    stages = run.pp * run.chunks
    if run.units is not None:
        counts = list(run.units)
        counts[0] -= 1
        counts[-1] -= 1
    elif run.cuts is not None:
        # The first and the last units are embedding, norm, head and reshaping.
        edges = [min(max(edge - PRE_UNITS, 0), run.layers) for edge in run.cuts]
        counts = [b - a for a, b in pairwise(edges)]
    elif run.family == "BigScience" and run.layers % stages and (run.layers + 2) % stages == 0:
        # Embedding and head count as a layer each (partition method "type:transformer|embedding").
        counts = list(even_parts(run.layers + 2, stages))
        counts[0] -= 1
        counts[-1] -= 1
    elif run.family == "BigScience":
        # DeepSpeed fills stage after stage: 78 blocks on 12 stages are 11 times 7 and 1 (chronicles-prequel.md).
        full = -(-run.layers // stages)
        counts = [min(full, max(run.layers - stage * full, 0)) for stage in range(stages)]
    else:
        counts = list(even_parts(run.layers, stages))
    if len(counts) != stages or sum(counts) != run.layers or min(counts) < 0:
        return f"its stages hold {counts} blocks, the model has {run.layers} on {stages} stages"
    return tuple(counts)


def _topology(run: MeasuredRun, placement: Placement, sailor: SailorFigures | None) -> Topology:
    """Return a topology of the placement's nodes. The figures of links come from the table's row, else from data
    sheets; those between nodes of Sailor's runs were measured by Sailor's authors.

    Args:
        sailor: Sailor's measured figures; None for runs of other families.
    """
    kinds = {worker.node: worker.type for row in placement for unit in row for worker in unit.devices}
    # Data sheets are per direction and GPU; a rate in the row is closer to the truth.
    stated = intra_node_bytes_per_s(run.intra_node)
    nodes = [
        Node(id=name, addr="", devices=[], intra_bytes_per_s=LINK_SHARE * (stated or SHEETS[kind].link_bytes_per_s))
        for name, kind in kinds.items()
    ]
    slowest = LINK_SHARE * min(SHEETS[kind].node_bytes_per_s for kind in kinds.values())
    between = inter_node_bytes_per_s(run.inter_node) or slowest
    if "PCIe" in run.intra_node and sailor is None:
        between = min(between, TCP_FLOW_BYTES_PER_S)
    links = _measured_links(kinds, run.tp, sailor) if sailor else []
    return Topology(
        provenance=Provenance(version=__version__, created="", transport="nccl", mode="published"),
        device_types={kind: DeviceType(kind="cuda", name=kind) for kind in kinds.values()},
        nodes=nodes,
        fabric=Fabric(
            classes=[
                LinkClass(
                    id="between",
                    alpha_s=stated_alpha_s(run.inter_node) or ALPHA_S,
                    beta_s_per_byte=1 / between,
                    pairs=0,
                )
            ],
            links=links,
        ),
    )


def _measured_links(kinds: dict[str, str], gpus: int, sailor: SailorFigures) -> list[Link]:
    names = list(kinds)
    links = []
    for number, a in enumerate(names):
        for b in names[number + 1 :]:
            rate = sailor.between(kinds[a], kinds[b], gpus)
            if rate is not None:
                figures = LinkFigures(alpha_s=ALPHA_S, beta_s_per_byte=1 / (LINK_SHARE * rate))
                links.append(Link(a=a, b=b, ab=figures, ba=figures))
    return links


def scenes_of(runs: Sequence[MeasuredRun], sailor: SailorFigures) -> tuple[list[PublishedScenario], dict[str, str]]:
    """Return (scenarios of the runs that can be described, run id -> why another run cannot be described or is left
    out)."""
    scenes, left = [], {}
    for run in runs:
        found = scene_of(run, sailor)
        if isinstance(found, str):
            left[run.id] = found
        else:
            scenes.append(found)
    return scenes, left
