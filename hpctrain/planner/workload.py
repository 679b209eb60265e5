"""What has to be computed in a step, and what the run file fixes about how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.base.errors import InputError
from hpctrain.records.imported_spec import Spec
from hpctrain.records.run import FixedParallel, Run

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")
"""In order of preference where they are equally fast: the first keeps the fewest activations."""


class Share(NamedTuple):
    """The part of the model that a stage holds."""

    blocks: int
    first: bool
    """With the embedding."""
    last: bool
    """With the last norm and the head."""


@dataclass(frozen=True)
class Workload:
    """A step of training."""

    spec: Spec
    rows: int
    """Sequences in a step over the whole job."""
    seq_len: int
    precision: str
    fixed: FixedParallel | None = None
    """Degrees given by hand."""

    def block_bytes(self, micro_batch: int, tp: int) -> float:
        """What a block keeps for its backward pass.

        In bf16 the matrix products keep 2 bytes a value, while norms, rotary positions and the residual stream stay in
        fp32: 3 is the mean.
        """
        value_bytes = 4 if self.precision == "fp32" else 3
        return float(self.spec.activation_bytes(micro_batch, self.seq_len, tp, value_bytes))

    def boundary_bytes(self, micro_batch: int) -> int:
        """The residual stream [rows, seq, dim] between two stages, in fp32 at either precision."""
        return self.spec.boundary_bytes(micro_batch, self.seq_len)

    def head_shards(self, tp: int) -> int:
        """Parts that embedding and head are cut into."""
        return self.spec.head_shards(tp)

    def parameters(self, share: Share, tp: int) -> int:
        """Parameters of a stage on one of `tp` devices."""
        ends = self.spec.end_parameters(tp, first=share.first, last=share.last)
        return share.blocks * self.spec.block_parameters(tp) + ends

    def micro_batch_sizes(self) -> list[int]:
        """Sizes to try: those that divide the batch, so that every micro-batch is equally long.

        Raises:
            InputError: the size given by hand does not.
        """
        sizes = [size for size in range(1, self.rows + 1) if self.rows % size == 0]
        if self.fixed is None or self.fixed.micro_batch is None:
            return sizes
        if self.fixed.micro_batch not in sizes:
            raise InputError(
                f"parallel.micro_batch: found {self.fixed.micro_batch}, batch.global {self.rows} is not a multiple of "
                f"it; allowed: {', '.join(map(str, sizes))}"
            )
        return [self.fixed.micro_batch]

    def schedules(self, pp: int) -> list[str]:
        """Schedules to try with `pp` pipeline ranks."""
        if self.fixed is not None and self.fixed.schedule is not None:
            return [self.fixed.schedule]
        if pp == 1:
            return ["1f1b"]  # forwards and backwards of one stage take the same time in any order
        return [name for name in SCHEDULES if name != "interleaved_1f1b" or self.spec.layers >= 2 * pp]


def workload_of(run: Run, spec: Spec) -> Workload:
    """The step that a run file asks for.

    Raises:
        InputError: the vocabulary is still open, or the micro-batch by hand does not divide the batch.
    """
    if spec.vocab is None:
        raise InputError(
            "model.vocab: not settled; give model.dims.vocab, or prepare the data with `hpctrain data prepare`"
        )
    fixed = run.parallel if isinstance(run.parallel, FixedParallel) else None
    work = Workload(spec, run.batch.global_, run.data.seq_len, run.precision, fixed)
    work.micro_batch_sizes()
    return work
