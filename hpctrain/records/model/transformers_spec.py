"""A decoder that transformers builds from a Hugging Face folder, with its tensors and its measured sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from hpctrain.records.model.measured_stack import MeasuredStack

Shape = list[int]


class TransformersSpec(MeasuredStack):
    """A causal language model of transformers that is none of hpctrain's own families. hpctrain cuts it into stages,
    and measured its sizes."""

    init_std: ClassVar[float] = 0.02
    """Standard deviation of weights that come from the seed; a run replaces them by those of the folder."""

    padding_id: ClassVar[None] = None
    """No weight is made zero when weights come from the seed."""

    family: Literal["transformers"] = "transformers"
    """The kind of model."""
    architecture: str
    """Name of the model's class in transformers, such as 'FalconForCausalLM'."""
    because: str
    """Why the model is none of hpctrain's own families, in words."""
    blocks: str
    """Path of the module that contains the blocks."""
    front: list[str]
    """Paths of the modules with weights that run before the blocks."""
    back: list[str]
    """Paths of the modules with weights that run after the blocks."""
    front_tensors: dict[str, Shape]
    """Name -> shape of the weights of the front modules."""
    block_tensors: dict[str, Shape]
    """Name within a block -> shape of the block's weights."""
    back_tensors: dict[str, Shape]
    """Name -> shape of the weights of the back modules, without those that are also in the front."""
    tied_weights: dict[str, str] = {}
    """Name of a weight of the back modules that is a weight of the front, too -> its name there."""
    prefix: str = ""
    """Beginning of the model's tensor names, such as 'transformer.', if the names in the folder lack it; else ''."""
    blocks_return_tuples: bool = False
    """Whether a block returns a tuple with the hidden state first, not the hidden state alone."""
    config: dict[str, Any] = Field(default={}, exclude=True)
    """Values of the folder's config.json. Files do not have this key here: run.yaml has the values in `HfModel.config`,
    beside these dimensions."""

    @property
    def tied(self) -> bool:
        """Return whether the front modules and the back modules share a weight."""
        return bool(self.tied_weights)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of each weight of the whole model, in the model's order. A tied weight comes once."""
        yield from self.front_tensors.items()
        for index in range(self.layers):
            for name, shape in self.block_tensors.items():
                yield f"{self.blocks}.{index}.{name}", shape
        yield from self.back_tensors.items()

    def absent_modules(self, *, first: bool, last: bool) -> list[str]:
        """Return the paths of the modules outside the blocks whose weights a stage does not hold.

        Args:
            first: whether the stage is the model's first one.
            last: whether the stage is the model's last one, which also holds the front modules with tied weights.
        """
        held = {name.rpartition(".")[0] for name in self.tied_weights.values()} if last else set()
        return [path for path in self.front if not first and path not in held] + ([] if last else self.back)

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that each of `tp` devices holds of a stage outside its blocks. The last stage
        has a copy of tied weights, unless it is the first one, too."""
        count = super().end_parameters(tp, first=first, last=last)
        if last and not first:
            held = {name.rpartition(".")[0] for name in self.tied_weights.values()}
            count += sum(
                math.prod(shape) for name, shape in self.front_tensors.items() if name.rpartition(".")[0] in held
            )
        return count

    def shared_weights(self, cuts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """Return name of a weight -> numbers of the stages that hold a copy, for each weight that several stages hold:
        the first and the last stage have a copy of tied weights.

        Args:
            cuts: the blocks [from, to) of each stage, in order.
        """
        ends = [0, len(cuts) - 1]
        return dict.fromkeys(self.tied_weights.values(), ends) if len(cuts) > 1 else {}

    def tensor_parallel_error(self, tp: int) -> str | None:
        """Return why the blocks cannot be split over `tp` devices; None if they can."""
        return None if tp == 1 else f"{self.architecture} is built by transformers, without tensor parallelism"
