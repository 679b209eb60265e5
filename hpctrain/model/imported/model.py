"""A stage of an imported model: it holds some of the model's modules under their original names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.base.errors import InputError
from hpctrain.model.imported.factory import call_factory, submodule
from hpctrain.model.transformer_part import StageBlocks
from hpctrain.records.model.imported_spec import ImportedSpec


class ImportedPart(nn.Module):
    """Front modules, blocks [start, start + n) and back modules of a model, applied in turn.

    Parameters have the names of the whole model, so they do not depend on the cut.
    """

    def __init__(self, model: nn.Module, front: list[str], blocks: dict[int, str], back: list[str]) -> None:
        super().__init__()
        # These names must not clash with those of the user's modules, which are added beside them.
        self._stage_front = front
        self._stage_blocks = blocks
        self._stage_back = back
        for path in [*front, *blocks.values(), *back]:
            _place(self, path, model.get_submodule(path))

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state [batch, seq, dim], or the logits in the last stage.

        The hidden state is fp32. Logits have autocast's dtype, or fp32 without autocast.

        Args:
            x: tokens [batch, seq] in the first stage, else the hidden state.
        """
        # The modules are looked up by name each time, because a wrapper replaces its block in the module tree.
        for path in [*self._stage_front, *self._stage_blocks.values(), *self._stage_back]:
            x = self.get_submodule(path)(x)
            if not isinstance(x, Tensor):
                raise InputError(f"model: {path} gave a {type(x).__name__}; allowed: one tensor")
        wanted = torch.float32
        if self._stage_back and torch.is_autocast_enabled(x.device.type):
            wanted = torch.get_autocast_dtype(x.device.type)
        return x.to(wanted)


def blocks_of(module: nn.Module) -> dict[int, nn.Module]:
    """Return number in the whole model -> block, in order, of an imported or built-in stage."""
    if isinstance(module, ImportedPart):
        return {index: module.get_submodule(path) for index, path in module._stage_blocks.items()}
    return {int(name): block for name, block in module.layers.named_children()}  # type: ignore[union-attr]


def build_imported(spec: ImportedSpec, blocks: StageBlocks, seed: int) -> nn.Module:
    """Build a stage of the model that the factory returns after `torch.manual_seed(seed)`.

    The whole model is built, so that the weights do not depend on the cut; the other parts are freed at once.

    Raises:
        InputError: the factory fails, or returns another model than the one that was measured.
    """
    torch.manual_seed(seed)
    model = call_factory(spec.factory, {"vocabulary": spec.tokens, "seq_len": spec.seq_len}, spec.args)
    names = block_names(model, spec.blocks)
    if len(names) != spec.layers:
        raise InputError(
            f"model.import: {spec.factory} gave {len(names)} blocks, it gave {spec.layers} when it was measured; a "
            "factory must give the same model each time"
        )
    if spec.tied and not (blocks.first and blocks.last):
        raise InputError("model.import: front and back share a weight, which cannot lie in two stages; use one stage")
    for path in [*spec.front, *spec.back]:
        submodule(model, path, "model.import")
    part = ImportedPart(
        model,
        spec.front if blocks.first else [],
        {index: names[index] for index in range(blocks.start, blocks.stop)},
        spec.back if blocks.last else [],
    )
    return part.train()


def block_names(model: nn.Module, container: str) -> list[str]:
    """Return the paths of the blocks in their container."""
    children = submodule(model, container, "model.blocks").named_children()
    return [f"{container}.{name}" for name, _ in children]


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a dotted path, with plain modules as its parents."""
    *parents, name = path.split(".")
    for part in parents:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(name, module)
