"""Sums gradients as products of two thin matrices (PowerSGD: Vogels, Karimireddy, Jaggi, 2019, arXiv:1905.13727)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError
from hpctrain.compress.collectives.bf16_sum import Bf16Sum
from hpctrain.compress.reducers.reducer import CodecReducer, DenseReducer, WarmUp, residual_ratio_metric
from hpctrain.compress.reducers.remainder import IntegerRemainder, padded
from hpctrain.records.plan.low_rank import PowerSgd, square_width

DEPENDENT = 1e-5
"""Share of a column's length below which the part that is orthogonal to all earlier columns counts as zero.

A smaller part is mostly fp32 rounding error.
"""


def orthonormalize(matrices: Tensor) -> None:
    """Make the columns of each matrix orthonormal in place; columns that depend on earlier ones become zero.

    The method is Gram-Schmidt with every projection done twice, which is enough for orthogonality up to rounding
    (Giraud, Langou and Rozložník 2005). For up to about 8 columns it is faster than LAPACK's QR. A zero column stays
    zero; QR would replace it by an arbitrary direction that costs bytes and carries nothing.

    Args:
        matrices: fp32 [batch, rows, columns], rows ≥ columns.
    """
    # The matrices are scaled so that no square of an entry overflows or underflows.
    matrices /= matrices.abs().amax(dim=1, keepdim=True).clamp_min_(torch.finfo(matrices.dtype).tiny)
    for index in range(matrices.shape[2]):
        column = matrices[:, :, index : index + 1]
        length = column.norm(dim=1, keepdim=True)
        if index:
            before = matrices[:, :, :index]
            for _ in range(2):
                column -= before @ (before.transpose(1, 2) @ column)
        remainder = column.norm(dim=1, keepdim=True)
        column.copy_(torch.where(remainder > DEPENDENT * length, column / remainder, 0.0))


class PowerSgdReducer(CodecReducer):
    """The reducer of mode `power_sgd`: low-rank sums of matrices, in two messages per step for any number of matrices.

    M is a rank's gradient plus its residual, and Q is random at first. In each step P = M·Q is summed over the ranks
    and made orthonormal, then a new Q = Mᵀ·P is summed (Vogels et al. 2019, algorithm 1). Both sums travel in bf16.
    P·Qᵀ replaces the sum of the gradients. A rank's residual is M − P·Q_rᵀ with the rank's summand Q_r of Q, as it was
    sent. With a remainder, this difference is then sent as integers of few bits, whose sum is added to P·Qᵀ, and only
    the error of rounding it to them stays in the residual.

    Nothing is lost: over all steps so far, the applied sums plus the present residuals of all ranks are the sum of all
    gradients. The one rank that rounds a sum of Q or of integers puts the error in its residual. Rounding of P leaves
    no error to keep, because Q is computed from the rounded P. Tensors that are not compressed travel with P.
    """

    def __init__(self, group: dist.ProcessGroup, chosen: Sequence[int], codec: PowerSgd) -> None:
        """Create the reducer; the first step, which shows the gradients' shapes, allocates its memory.

        Args:
            group: the replicas.
            chosen: indices of the gradients that may be compressed. A gradient with fewer than two dimensions, or too
                small for the rank of the approximation, is summed exactly all the same.
            codec: the settings, the same on every rank.
        """
        super().__init__(group, chosen)
        self._codec = codec
        self._matrix_batches: list[MatrixBatch] = []
        self._remainder: IntegerRemainder | None = None
        self._loaded: dict[str, Tensor] = {}
        """The argument of `load_state`, held until the first step shows the gradients' shapes."""
        self._warm_up: WarmUp | None = None
        self._norms: list[Tensor] = []
        """Norms of this rank's matrices in the last step; empty if the last step was not compressed."""

    def reduce(self, gradients: list[Tensor]) -> int:
        if self._world == 1:
            return 0
        warm_up = self._warm_up or self._begin(gradients)
        agreed = warm_up.agreed
        compressed = warm_up.over(gradients[0].device)
        if not agreed:
            self._broadcast_directions()
        matrices, others = self._split(gradients)
        self._norms = []
        if not compressed or not matrices:
            return self._exempt.reduce(others) + self._whole.reduce(matrices)
        return self._reduce_products(gradients, others, matrices)

    def _reduce_products(self, gradients: list[Tensor], others: list[Tensor], matrices: list[Tensor]) -> int:
        norms = torch._foreach_norm(matrices, dtype=torch.float32)
        for matrix_batch in self._matrix_batches:
            matrix_batch.project([gradients[index] for index in matrix_batch.members])
        sent = self._p.bfloat16()
        sent_bytes = self._first.reduce([*others, sent])
        # The sums are the same on every rank, so all ranks decide alike; the residuals are still unchanged.
        if not bool(torch.stack([tensor.isfinite().all() for tensor in (sent, *others)]).all()):
            return sent_bytes + self._whole.reduce(matrices)
        self._p.copy_(sent)
        for matrix_batch in self._matrix_batches:
            orthonormalize(matrix_batch.p)
            matrix_batch.project_back([gradients[index] for index in matrix_batch.members])
        factors = Bf16Sum(self._q, self._group)
        for matrix_batch in self._matrix_batches:
            matrix_batch.subtract_product()
        sums = [
            matrix if _is_plain(matrix) else matrix.new_empty(matrix.shape, dtype=torch.float32) for matrix in matrices
        ]
        if self._remainder is not None:
            sent_bytes += self._remainder.reduce([tensor.view(-1) for tensor in sums])
        self._keep_rounding_errors(*factors.finish())
        self._add_products(sums)
        for matrix, tensor in zip(matrices, sums, strict=True):
            if tensor is not matrix:
                matrix.copy_(tensor.view_as(matrix))
        self._norms = list(norms)
        return sent_bytes + factors.sent_bytes

    def _keep_rounding_errors(self, start: int, errors: Tensor) -> None:
        """Add the rounding errors of the sums of Q to the residuals.

        Args:
            start: position, in all matrices Q one after the other, of the first sum that this rank rounded.
            errors: [m]: the sums from there on before rounding − after it.
        """
        flat = torch.zeros_like(self._q)
        flat[start : start + len(errors)] = errors
        first = 0
        for matrix_batch in self._matrix_batches:
            size = matrix_batch.q[0].numel()
            of_batch = flat[first : first + matrix_batch.q.numel()].view_as(matrix_batch.q)
            # Most matrices have no error, because another rank rounded their sums.
            low, high = (start - first) // size, -(-(start + len(errors) - first) // size)
            matrix_batch.add_product(of_batch, slice(max(0, low), max(0, high)))
            first += matrix_batch.q.numel()

    def _add_products(self, sums: list[Tensor]) -> None:
        """Add P·Qᵀ to the sums of the remainder, or overwrite `sums` with it where there is no remainder.

        Args:
            sums: for each matrix, in the order of the batches; fp32, contiguous.
        """
        factors = ((p, q) for batch in self._matrix_batches for p, q in zip(batch.p, batch.q, strict=True))
        for tensor, (p, q) in zip(sums, factors, strict=True):
            tensor.view(len(p), -1).addmm_(p, q.T, beta=0 if self._remainder is None else 1)

    def metrics(self) -> dict[str, float]:
        """Return `residual_norm_ratio` of the last step; empty if the step was not compressed.

        The ratio is the L2 norm of this rank's residuals divided by that of its gradients of compressed parameters,
        before compression.
        """
        if not self._norms:
            return {}
        residuals = torch._foreach_norm([matrix_batch.residual for matrix_batch in self._matrix_batches])
        return residual_ratio_metric(float(torch.stack(residuals).norm()), float(torch.stack(self._norms).norm()))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals, matrices Q and step count, without a copy: the next step changes the tensors.

        Keys are 'residual.INDEX' and 'q.INDEX', and 'steps'. INDEX is the number of a gradient, counted from 0, in the
        list that `reduce` gets.
        """
        if self._warm_up is None:
            return dict(self._loaded)
        state = {"steps": self._warm_up.state()}
        for matrix_batch in self._matrix_batches:
            for row, index in enumerate(matrix_batch.members):
                state[f"q.{index}"] = matrix_batch.q[row]
                state[f"residual.{index}"] = matrix_batch.residual[row]
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore residuals, matrices Q and step count from `state`, a result of the method `state`.
        What is missing in it starts as in a new run.

        Raises:
            CheckpointError: a tensor of the state has another shape than expected. Before the first step the shapes are
                not known; then the first step raises the error.
        """
        if self._warm_up is None:
            self._loaded = dict(state)
            return
        self.drop_state()
        self._warm_up.load_state(state.get("steps"))
        for matrix_batch in self._matrix_batches:
            for row, index in enumerate(matrix_batch.members):
                _restore(matrix_batch.q[row], state, f"q.{index}")
                _restore(matrix_batch.residual[row], state, f"residual.{index}")

    def drop_state(self) -> None:
        """Drop residuals, and reset the factors Q, with which the next step begins, to their initial values. Either all
        ranks must do so, or none, because Q is equal on all ranks.
        """
        self._loaded = {}
        for matrix_batch in self._matrix_batches:
            matrix_batch.residual.zero_()
        if self._matrix_batches:
            self._q.copy_(self._fresh)

    def _begin(self, gradients: list[Tensor]) -> WarmUp:
        batches: dict[tuple[int, int], list[int]] = {}
        for index in self._chosen:
            gradient = gradients[index]
            if gradient.ndim >= 2:
                rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
                if self._codec.compresses(rows, columns):
                    batches.setdefault((rows, columns), []).append(index)
        self._chosen = [index for members in batches.values() for index in members]
        self._matrix_batches = self._make_batches(batches, gradients[0].device)
        self._first = DenseReducer(self._group)
        self._warm_up = WarmUp(self._group, self._codec.warmup_steps or 0)
        loaded = self._loaded
        if loaded:
            self.load_state(loaded)
        return self._warm_up

    def _make_batches(self, members: dict[tuple[int, int], list[int]], device: torch.device) -> list[MatrixBatch]:
        """Allocate the messages with the factors, the residuals and the remainder; return the batches, whose tensors
        are views of them.

        Args:
            members: (rows, columns) -> indices of the gradients with this shape.
            device: device of the gradients.
        """
        counts = [(len(indices), *shape) for shape, indices in members.items()]
        ranks = [self._codec.rank_of(square_width(*shape)) for shape in members]
        p_shapes = [(count, rows, rank) for (count, rows, _), rank in zip(counts, ranks, strict=True)]
        q_shapes = [(count, columns, rank) for (count, _, columns), rank in zip(counts, ranks, strict=True)]
        self._p, self._q = (torch.empty(sum(map(math.prod, shapes)), device=device) for shapes in (p_shapes, q_shapes))
        # Drawn on the CPU, because every kind of device must get the same numbers.
        self._fresh = torch.randn(self._q.numel(), generator=torch.Generator().manual_seed(0)).to(device)
        self._q.copy_(self._fresh)
        sizes = [math.prod(shape) for shape in members for _ in members[shape]]
        residuals = torch.zeros(padded(sum(sizes), self._world), device=device)
        if self._codec.remainder_bits and sizes:
            self._remainder = IntegerRemainder(self._group, self._codec.remainder_bits, residuals, sizes)
        tensors = ((self._p, p_shapes), (self._q, q_shapes), (self._fresh, q_shapes), (residuals, counts))
        views = [_views(flat, shapes) for flat, shapes in tensors]
        return [MatrixBatch(*parts) for parts in zip(members.values(), *views, strict=True)]

    def _broadcast_directions(self) -> None:
        """Give all ranks the matrices Q of the group's first rank, because a rank that joined later has others.
        Collective.
        """
        if self._matrix_batches:
            dist.broadcast(self._q, group=self._group, group_src=0)


@dataclass
class MatrixBatch:
    """Matrices of one shape, batched so that a device starts one kernel for all of them."""

    members: list[int]
    """Indices of the batch's matrices in the list of gradients."""
    p: Tensor
    """P of each matrix: [matrices, rows, rank], in the memory of the first message."""
    q: Tensor
    """Q of each matrix: [matrices, columns, rank], in the memory of the second message; Q is kept from step to step."""
    fresh: Tensor
    """Random initial values of Q, in the shape of `q`."""
    residual: Tensor
    """Residuals: [matrices, rows, columns]."""

    def project(self, gradients: list[Tensor]) -> None:
        """Compute P = (residual + gradient)·Q of each matrix, after columns of Q that are zero are replaced by those of
        `fresh`.

        The residual stays unchanged, because the step does not count if the sum of P is not finite.
        """
        # A direction that the last sum did not have is zero. It would stay zero if it were not drawn again.
        torch.where(self.q.square().sum(dim=1, keepdim=True) > 0, self.q, self.fresh, out=self.q)
        torch.bmm(self.residual, self.q, out=self.p)
        for p, q, gradient in zip(self.p, self.q, gradients, strict=True):
            p.addmm_(_matrix(gradient), q)

    def project_back(self, gradients: list[Tensor]) -> None:
        """Add the gradients to the residuals, and compute this rank's summand Q = residualᵀ·P of each matrix, from the
        P that is summed and orthonormal.
        """
        torch._foreach_add_(list(self.residual), [_matrix(gradient) for gradient in gradients])
        torch.bmm(self.residual.transpose(1, 2), self.p, out=self.q)

    def subtract_product(self) -> None:
        """Subtract P·Qᵀ, with this rank's summand Q as it was sent, from the residual of each matrix."""
        self.residual.baddbmm_(self.p, self.q.transpose(1, 2), alpha=-1)

    def add_product(self, errors: Tensor, matrices: slice) -> None:
        """Add P·errorsᵀ to the residuals of some matrices.

        Args:
            errors: in the shape of `q`.
            matrices: the matrices, by their position in the batch.
        """
        self.residual[matrices].baddbmm_(self.p[matrices], errors[matrices].transpose(1, 2))


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return consecutive views of a flat tensor in these shapes; numbers after the last one are left over."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


_PLAIN: dict[str, Any] = {"dtype": torch.float32, "memory_format": torch.contiguous_format}


def _is_plain(gradient: Tensor) -> bool:
    return gradient.dtype == torch.float32 and gradient.is_contiguous()


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.float().reshape(gradient.shape[0], -1)


def _restore(target: Tensor, state: dict[str, Tensor], key: str) -> None:
    source = state.get(key)
    if source is None:
        return
    if source.shape != target.shape:
        raise CheckpointError(
            f"compression state {key}: found shape {list(source.shape)}, allowed {list(target.shape)}; "
            "drop the state of the reducers where the layout of the ranks changed"
        )
    target.copy_(source)
