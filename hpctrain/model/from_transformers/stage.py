"""A pipeline stage of a model that transformers built.

A stage runs the model's own forward pass. The blocks and the weights of other stages are absent: an absent block passes
the hidden state on, the first block of the stage gets the hidden state that the stage received, and a stage that is not
the last one leaves the forward pass after its last block. So everything that the model does around its blocks (masks,
position angles, scaled embeddings and logits) is done by the code of transformers, in every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import InputError
from hpctrain.model.from_transformers.load import build_with_constants, materialise
from hpctrain.model.imported.model import CutPart
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.transformers_spec import TransformersSpec


class StageEndError(Exception):
    """Ends the model's forward pass after the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage ends here")
        self.hidden = hidden


class BlockList(nn.ModuleList):
    """The container of a model's blocks in one stage. Code that iterates over it meets every block of the model, but
    only the stage's own blocks have weights."""

    def __init__(self, blocks: list[nn.Module], stage: StageBlocks, as_tuple: bool) -> None:
        """Create the container.

        Args:
            blocks: all blocks of the model.
            stage: which of them the stage has.
            as_tuple: whether a block returns a tuple with the hidden state first, not the hidden state alone.
        """
        super().__init__()
        self._plain = blocks
        self.stage = stage
        self._as_tuple = as_tuple
        self.received: Tensor | None = None
        """Hidden state that the stage received; None in the first stage."""
        for index in range(stage.start, stage.stop):
            self.add_module(str(index), blocks[index])

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        return (_Entry(self, index) for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        return _Entry(self, places) if isinstance(places, int) else [_Entry(self, place) for place in places]

    def run(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return what the block with this number returns. In place of a block before the stage, return the hidden state
        in the form of a block's output.

        Raises:
            StageEndError: the block follows the stage's last one, or it is the model's last one, and the stage is not
                the model's last.
        """
        stage, hidden = self.stage, self.received
        if hidden is None or index > stage.start:
            hidden = _hidden_of(args, kwargs)
        else:
            args, kwargs = _with_hidden(args, kwargs, hidden)
        if index >= stage.stop:
            raise StageEndError(hidden)
        if index < stage.start:
            output = (hidden, None) if self._as_tuple else hidden
        else:
            # The block is looked up by name each time, because a wrapper may replace it in the module tree.
            output = self._modules[str(index)](*args, **kwargs)
        if index == len(self) - 1 and not stage.last:
            raise StageEndError(output[0] if isinstance(output, tuple) else output)
        return output

    def plain(self, index: int) -> nn.Module:
        """Return the block with this number. The weights of another stage's block have no values."""
        return self._modules.get(str(index)) or self._plain[index]


class _Entry:
    """A block, as the model's forward pass sees it: it can be called and has the block's attributes."""

    def __init__(self, container: BlockList, index: int) -> None:
        self._container = container
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._container.run(self._index, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container.plain(self._index), name)


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


class _Absent(nn.Module):
    """Stands for a module with weights that belongs to another stage; its result is used by nothing."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.width = width
        """Width of the zero vectors that stand for an embedding's; None: the absent module is no embedding, and
        `forward` returns its input."""

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return x if self.width is None else torch.zeros(*x.shape, self.width, device=x.device)


class TransformersPart(CutPart):
    """A stage of a model of transformers. Each parameter has the same name as in the whole model."""

    def __init__(self, model: nn.Module, container: str, stage: StageBlocks, absent: list[str], as_tuple: bool) -> None:
        """Take the stage out of a model, which is of no further use.

        Args:
            model: the whole model; its weights may be on the meta device.
            container: path of the container of the blocks.
            stage: the stage's blocks, and whether it is the first or the last one.
            absent: paths of the modules outside the blocks whose weights the stage does not need.
            as_tuple: whether a block returns a tuple with the hidden state first, not the hidden state alone.
        """
        super().__init__()
        blocks = list(model.get_submodule(container).children())
        self._blocks_path = container
        self._stage = stage
        model.set_submodule(container, BlockList(blocks, stage, as_tuple))
        for path in absent:
            module = model.get_submodule(path)
            model.set_submodule(path, _Absent(module.embedding_dim if isinstance(module, nn.Embedding) else None))
        for name, child in model.named_children():
            self.add_module(name, child)
        self._buffers = model._buffers
        # In a list, so that the whole model is no submodule: its children are those of this stage.
        self._whole = [model]

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state [batch, seq, dim], or in the last stage the logits [batch, seq, vocabulary].

        The hidden state is fp32. Logits have autocast's dtype, or fp32 without autocast.

        Args:
            x: tokens [batch, seq] in the first stage, else the hidden state.

        Raises:
            InputError: the model returns something other than one tensor.
        """
        container: Any = self.get_submodule(self._blocks_path)
        # What a later stage computes in front of its blocks is not used, so it needs no graph.
        named = {"input_ids": x} if self._stage.first else {"inputs_embeds": x.detach()}
        container.received = None if self._stage.first else x
        wanted = torch.float32
        try:
            output = self._whole[0](**named, use_cache=False).logits
            if torch.is_autocast_enabled(x.device.type):
                wanted = torch.get_autocast_dtype(x.device.type)
        except StageEndError as end:
            output = end.hidden
        finally:
            container.received = None
        if not isinstance(output, Tensor):
            raise InputError(f"model.hf: the stage gave a {type(output).__name__}; expected one tensor")
        return output.to(wanted)

    def train(self, mode: bool = True) -> TransformersPart:
        super().train(mode)
        self._whole[0].training = mode
        return self

    def take_stage(self, stage: StageBlocks) -> None:
        """Make this part stand for another stage, whose blocks are among those of this one."""
        self._stage = stage
        container: Any = self.get_submodule(self._blocks_path)
        container.stage = stage

    def numbered_blocks(self) -> dict[int, nn.Module]:
        held = self.get_submodule(self._blocks_path).named_children()
        return {int(name): block for name, block in held}


def build_transformers(spec: TransformersSpec, blocks: StageBlocks) -> TransformersPart:
    """Return a stage of a model that transformers builds, with uninitialised weights. Only the stage's own weights take
    memory.

    Raises:
        InputError: transformers is missing, or builds other weights than when the run was made.
    """
    absent = spec.absent_modules(first=blocks.first, last=blocks.last)
    model = build_with_constants(spec.config)
    known = dict(spec.tensors())
    built = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if built != known:
        name = min(name for name in built.keys() | known.keys() if built.get(name) != known.get(name))
        raise InputError(
            f"model.hf: transformers builds {name} as {built.get(name, 'no weight')}, and built "
            f"{known.get(name, 'no such weight')} when the run was made; use the same version of transformers"
        )
    part = TransformersPart(model, spec.blocks, blocks, absent, spec.blocks_return_tuples)
    materialise(part)
    part.train()
    return part
