"""Sums of tensor parallelism by level, for tensor-parallel groups that span nodes: in full precision within a node, in
bf16 between nodes.

Between nodes, an all-reduce is a reduce-scatter and an all-gather, as sequence parallelism has them. Each device adds
up one part of the numbers in fp32, so a sum is rounded once more than its terms, not after every addition. All devices
get the same sums bit by bit. A sum is needed at once, so nothing keeps the rounding errors for later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from hpctrain.records.plan.plan import Plan

SEQUENCE_DIM = 1
"""Dimension of activations [batch, seq, dim] along which sequence parallelism splits them."""
# torch 2.13 warns about the old name; torch 2.12 does not have the new one.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


@dataclass(frozen=True)
class LevelSums:
    """The collectives of a tensor-parallel group that spans nodes, on tensors of this rank.

    In the group, the devices of a node have consecutive ranks, equally many on each node.
    """

    mesh: DeviceMesh
    """[tp]: the whole group."""
    within: dist.ProcessGroup | None
    """The devices of the group on this node; None if there is only this one."""
    between: dist.ProcessGroup
    """The devices with this one's place, on all nodes of the group."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sums of the tensors `partial` of all ranks, in their shape. Collective over the group."""
        devices = self.mesh.size()
        part = -(-partial.numel() // devices)
        numbers = partial.new_zeros(devices * part)
        numbers[: partial.numel()] = partial.flatten()
        sums = self._all_gather(self._reduce_scatter(numbers.view(devices, part)))
        return sums.flatten()[: partial.numel()].view_as(partial)

    def scatter_sequence(self, partial: Tensor) -> Tensor:
        """Return this rank's part along the sequence of the sums over all ranks. Collective over the group.

        Args:
            partial: [batch, seq, dim]; the number of devices divides `seq`.
        """
        return self._reduce_scatter(torch.stack(partial.chunk(self.mesh.size(), SEQUENCE_DIM)))

    def gather_sequence(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks along the sequence, rounded to bf16: [batch, seq, dim]. Collective over the
        group.

        Args:
            part: this rank's part, [batch, seq / tp, dim].
        """
        return torch.cat(tuple(self._all_gather(part)), SEQUENCE_DIM)

    def _reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's part.

        Args:
            parts: [tp, …]: row i is the part of rank i.
        """
        if self.within is not None:
            by_device = parts.unflatten(0, (-1, dist.get_world_size(self.within))).transpose(0, 1)
            parts = _sum_of_rows(by_device, self.within, parts.dtype)
        return _sum_of_rows(parts, self.between, _sent_dtype(parts))

    def _all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, rounded to what is sent between nodes: [tp, …]."""
        rows = funcol.wait_tensor(_all_gather(part.to(_sent_dtype(part))[None].contiguous(), 0, self.between))
        if self.within is not None:
            rows = funcol.wait_tensor(_all_gather(rows[None], 0, self.within)).transpose(0, 1).flatten(0, 1)
        return rows.to(part.dtype)


def _sent_dtype(numbers: Tensor) -> torch.dtype:
    """Return the dtype in which numbers travel between nodes: bf16 for fp32; autocast's 2-byte numbers stay as they
    are."""
    return torch.bfloat16 if numbers.dtype == torch.float32 else numbers.dtype


def _sum_of_rows(rows: Tensor, group: dist.ProcessGroup, sent: torch.dtype) -> Tensor:
    """Return the sum, added up in fp32, over the ranks of the row for this rank. Collective over the group.

    Args:
        rows: [ranks, …]: row i goes to rank i.
        sent: dtype of the numbers in messages.
    """
    received = funcol.wait_tensor(funcol.all_to_all_single(rows.to(sent).contiguous(), None, None, group))
    return received.sum(0, dtype=torch.float32).to(rows.dtype)


class _Whole(torch.autograd.Function):
    """Makes the input of split matrices whole on each device; backward sums the gradients of all devices."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, sums: LevelSums, layout: Placement) -> DTensor:
        """Return a DTensor with the whole input on each device.

        Args:
            stream: this device's activations [batch, seq, dim], or its part of them along the sequence.
            layout: whether they are whole (`Replicate`) or split along the sequence.
        """
        ctx.sums, ctx.layout = sums, layout
        whole = stream if layout.is_replicate() else sums.gather_sequence(stream)
        return DTensor.from_local(whole, sums.mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None]:
        return _to_stream(grad, ctx.sums, ctx.layout), None, None


class _Stream(torch.autograd.Function):
    """Sums the output of split matrices over the devices; backward makes its gradient whole on each device."""

    @staticmethod
    def forward(ctx: Any, output: DTensor, sums: LevelSums, layout: Placement) -> Tensor:
        """Return this device's activations of the residual stream, whole or split along the sequence.

        Args:
            output: the matrices' output, a partial sum on each device.
            layout: `Replicate`, or the split along the sequence.
        """
        ctx.sums, ctx.layout = sums, layout
        return _to_stream(output, sums, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None, None]:
        whole = grad if ctx.layout.is_replicate() else ctx.sums.gather_sequence(grad)
        return DTensor.from_local(whole, ctx.sums.mesh, [Replicate()], run_check=False), None, None


def _to_stream(output: DTensor, sums: LevelSums, layout: Placement) -> Tensor:
    if not output.placements[0].is_partial():
        return output.redistribute(sums.mesh, [layout]).to_local()
    partial = output.to_local()
    return sums.all_reduce(partial) if layout.is_replicate() else sums.scatter_sequence(partial)


class _SummedOutput(RowwiseParallel):
    """torch's style for matrices that are split by rows, with sums by level in training; validation sums exactly."""

    def __init__(self, sums: LevelSums, layout: Placement) -> None:
        super().__init__(output_layouts=Partial(), use_local_output=False)
        self._sums, self._layout = sums, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_stream(split: nn.Module, _inputs: object, output: DTensor) -> Tensor:
            if split.training:
                return _Stream.apply(output, self._sums, self._layout)
            return output.redistribute(device_mesh, [self._layout]).to_local()

        module = super()._apply(module, device_mesh)
        module.register_forward_hook(to_stream)
        return module


class _SummedInput(ParallelStyle):
    """Another style, whose inputs are made whole before; in training, their gradients are summed by level."""

    def __init__(self, sums: LevelSums, style: PrepareModuleInput | ColwiseParallel) -> None:
        """Take over the style.

        Args:
            style: a style that nothing else uses; its layouts of inputs are changed.
        """
        self._sums, self._style, self._layouts = sums, style, style.input_layouts or ()
        # If they differed, torch would redistribute the inputs, and sum their gradients exactly.
        style.input_layouts = style.desired_input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(value: Any, layout: Placement | None) -> Any:
            # A matrix within a prepared module gets a DTensor already, and look-ups get integers.
            if layout is None or isinstance(value, DTensor) or not value.is_floating_point():
                return value
            if module.training:
                return _Whole.apply(value, self._sums, layout)
            return DTensor.from_local(value, device_mesh, [layout], run_check=False).redistribute(
                device_mesh, [Replicate()]
            )

        def make_whole(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(whole(value, layout) for value, layout in zip(inputs, self._layouts, strict=True))

        module = self._style._apply(module, device_mesh)
        module.register_forward_pre_hook(make_whole, prepend=True)
        return module


def with_sums(styles: Mapping[str, ParallelStyle], sums: LevelSums | None) -> dict[str, ParallelStyle]:
    """Return name of a module -> style that does what torch's style in `styles` does, with the activations and their
    gradients summed by `sums`; None: torch's styles themselves.

    Styles that sum nothing stay as they are, and so does that of the embedding, whose look-ups torch sums exactly.
    """
    if sums is None:
        return dict(styles)
    summed: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        if isinstance(style, RowwiseParallel) and name != "embedding":
            style = _SummedOutput(sums, style.output_layouts[0])
        elif isinstance(style, PrepareModuleInput | ColwiseParallel):
            style = _SummedInput(sums, style)
        summed[name] = style
    return summed


def build_level_sums(plan: Plan, mesh: DeviceMesh, timeout: timedelta | None = None) -> LevelSums | None:
    """Return how this rank sums activations with its tensor-parallel group; None if torch sums them exactly. Collective
    over all ranks.

    Args:
        mesh: the plan's mesh.
        timeout: how long a collective among some of the group's devices waits for them; None: torch's default.
    """
    per_node = plan.tp_per_node
    if plan.tensor_parallel_sums == "none" or per_node == plan.tp:
        return None
    if per_node == 1:
        return LevelSums(mesh["tp"], None, mesh.get_group("tp"))
    groups = mesh.mesh.reshape(-1, plan.tp // per_node, per_node)
    within, between = (
        dist.new_subgroups_by_enumeration(rows.flatten(0, 1).tolist(), timeout)[0]
        for rows in (groups, groups.transpose(1, 2))
    )
    return LevelSums(mesh["tp"], within, between)
