"""Sums gradients as products of two thin matrices (PowerSGD: Vogels, Karimireddy, Jaggi, 2019, arXiv:1905.13727)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.activity import ACTIVITY
from hpctrain.base.errors import CheckpointError
from hpctrain.compress.reducers.reducer import CodecReducer, DenseReducer, WarmUp, residual_ratio_metric
from hpctrain.records.plan.compression import PowerSgd

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
    and made orthonormal, then a new Q = Mᵀ·P is summed (Vogels et al. 2019, algorithm 1). P·Qᵀ replaces the sum of the
    gradients. A rank's residual is M − P·Q_rᵀ with the rank's summand Q_r of Q, so nothing is lost: over all steps so
    far, the applied sums plus the present residuals of all ranks are the sum of all gradients. Tensors that are not
    compressed travel with P.
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
        sent_bytes = self._first.reduce([*others, self._p])
        # The sums are the same on every rank, so all ranks decide alike; the residuals are still unchanged.
        if not bool(torch.stack([tensor.isfinite().all() for tensor in (self._p, *others)]).all()):
            return sent_bytes + self._whole.reduce(matrices)
        for matrix_batch in self._matrix_batches:
            orthonormalize(matrix_batch.p)
            matrix_batch.project_back([gradients[index] for index in matrix_batch.members])
        with ACTIVITY.doing("all-reduce over dp, second factors", waits="dp"):
            dist.all_reduce(self._q, group=self._group)
        for matrix_batch in self._matrix_batches:
            matrix_batch.apply([gradients[index] for index in matrix_batch.members])
        self._norms = list(norms)
        return sent_bytes + 2 * (self._world - 1) * self._q.numel() * self._q.element_size() // self._world

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
        shapes: dict[tuple[int, int], list[int]] = {}
        for index in self._chosen:
            gradient = gradients[index]
            if gradient.ndim >= 2:
                rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
                if self._is_worth_compressing(rows, columns):
                    shapes.setdefault((rows, columns), []).append(index)
        self._chosen = [index for members in shapes.values() for index in members]
        device = gradients[0].device
        self._p, self._q = (torch.empty(sum(self._sizes(shapes, side)), device=device) for side in (0, 1))
        # Drawn on the CPU, because every kind of device must get the same numbers.
        self._fresh = torch.randn(self._q.numel(), generator=torch.Generator().manual_seed(0)).to(device)
        self._q.copy_(self._fresh)
        p, q, fresh = (self._views(flat, shapes, side) for flat, side in ((self._p, 0), (self._q, 1), (self._fresh, 1)))
        self._matrix_batches = [
            MatrixBatch(members, p[at], q[at], fresh[at], torch.zeros(len(members), *shape, device=device))
            for at, (shape, members) in enumerate(shapes.items())
        ]
        self._first = DenseReducer(self._group)
        self._warm_up = WarmUp(self._group, self._codec.warmup_steps)
        loaded = self._loaded
        if loaded:
            self.load_state(loaded)
        return self._warm_up

    def _is_worth_compressing(self, rows: int, columns: int) -> bool:
        sent = self._codec.rank * (rows + columns)
        return self._codec.rank <= min(rows, columns) and sent * self._codec.min_compression <= rows * columns

    def _sizes(self, shapes: dict[tuple[int, int], list[int]], side: int) -> list[int]:
        """Return, for each shape of matrices, how many numbers of a message belong to its matrices.

        Args:
            shapes: (rows, columns) -> indices of the gradients with this shape.
            side: 0: the message with P. 1: the message with Q.
        """
        return [self._codec.rank * shape[side] * len(members) for shape, members in shapes.items()]

    def _views(self, flat: Tensor, shapes: dict[tuple[int, int], list[int]], side: int) -> list[Tensor]:
        """Return views of a message, one per shape of matrices: [matrices, rows or columns, rank of the approximation].

        Args:
            flat: the message.
            shapes: (rows, columns) -> indices of the gradients with this shape.
            side: 0: the message with the factors P [rows, rank] of the matrices. 1: with the factors Q [columns, rank].
        """
        rank = self._codec.rank
        pairs = zip(flat.split(self._sizes(shapes, side)), shapes.items(), strict=True)
        return [part.view(len(members), shape[side], rank) for part, (shape, members) in pairs]

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
        """Compute this rank's summand Q = (residual + gradient)ᵀ·P of each matrix, from the P that is summed and
        orthonormal. The residual of the matrix becomes residual + gradient − P·Qᵀ.
        """
        torch._foreach_add_(list(self.residual), [_matrix(gradient) for gradient in gradients])
        torch.bmm(self.residual.transpose(1, 2), self.p, out=self.q)
        self.residual.baddbmm_(self.p, self.q.transpose(1, 2), alpha=-1)

    def apply(self, gradients: list[Tensor]) -> None:
        """Overwrite the gradient of each matrix with P·Qᵀ."""
        for p, q, gradient in zip(self.p, self.q, gradients, strict=True):
            if gradient.ndim == 2 and gradient.dtype == p.dtype:
                torch.mm(p, q.T, out=gradient)
            else:
                gradient.copy_((p @ q.T).view_as(gradient))


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
