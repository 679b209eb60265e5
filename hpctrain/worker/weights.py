"""The weights of a run's model at a step, one parameter at a time: those of a checkpoint, or those before training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.load import CheckpointReader
from hpctrain.model.build import Fill, build_modules, build_part, initialise
from hpctrain.model.hf_weights import HfWeights
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.model.transformers_spec import TransformersSpec
from hpctrain.records.run.run import Run

PREFIX = "model."
"""Before the name of a parameter in a checkpoint; other tensors of a checkpoint are the optimizer's."""


class Weights(Protocol):
    """The weights of a whole model, of which a process holds only those that it has just read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of every parameter. A parameter that several modules share comes once, under one
        name."""

    def read(self, name: str) -> Tensor:
        """Return the whole parameter `name`, on the CPU.

        Raises:
            CheckpointError: the parameter cannot be read.
        """


class SavedWeights:
    """The weights in a checkpoint of any plan, whose hashes the command has just checked."""

    def __init__(self, checkpoint: Path) -> None:
        self._reader = CheckpointReader(checkpoint, hashed=True)
        self._entries = self._reader.entries(PREFIX)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(entry.size) for name, entry in self._entries.items()}

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._reader.load({f"{PREFIX}{name}": tensor}, None)
        return tensor


class FirstWeights:
    """The weights before training: from the run's seed, from the folder `model.hf`, or from the user's factory, which
    builds its whole model at once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        spec, whole = run.spec(), StageBlocks(0, run.spec().layers, True, True)
        if isinstance(spec, ImportedSpec):
            self._model: dict[str, Tensor] = dict(build_part(spec, whole, run.seed).named_parameters())
        elif isinstance(spec, TransformersSpec):
            self._model = {name: torch.empty(shape, device="meta") for name, shape in spec.tensors()}
        else:
            with torch.device("meta"):
                model = build_modules(spec, whole)
                model.tie()
            self._model = dict(model.named_parameters())
        self._hf = _hf_weights(run)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._model.items()}

    def read(self, name: str) -> Tensor:
        spec, known = self._run.spec(), self._model[name].detach()
        if isinstance(spec, ImportedSpec):
            return known
        tensor = torch.empty_like(known, device="cpu")
        if self._hf is not None:
            self._hf.copy_to([(name, tensor)])
        else:
            initialise([(name, tensor)], spec, self._run.seed)
        return tensor


def weights_of(run: Run, checkpoint: Path | None) -> Weights:
    """Return the weights of a verified checkpoint of the run; without a checkpoint, those before training. The code of
    an imported model has to be on sys.path.

    Raises:
        InputError: the folder `model.hf` or the user's factory no longer gives the run's model.
        CheckpointError: the checkpoint cannot be read.
    """
    return FirstWeights(run) if checkpoint is None else SavedWeights(checkpoint)


def fill_of(run: Run, checkpoint: Path | None) -> Fill | None:
    """Return the function that gives a new stage its weights from a verified checkpoint or, without a checkpoint, those
    before training; None if a new stage has these already.

    Raises:
        InputError: the folder `model.hf` no longer has the weights from which the run was made.
        CheckpointError: the checkpoint cannot be read.
    """
    return first_fill(run) if checkpoint is None else partial(copy_weights, SavedWeights(checkpoint))


def first_fill(run: Run) -> Fill | None:
    """Return the function that gives a new stage the weights of the folder `model.hf`; None if the run begins with
    those that a new stage has.

    Raises:
        InputError: the folder no longer has the weights from which the run was made.
    """
    weights = _hf_weights(run)
    return None if weights is None else weights.fill


@torch.no_grad()
def copy_weights(weights: Weights, module: nn.Module) -> None:
    """Copy weights into all parameters of a module, which keep their device and their dtype.

    Raises:
        CheckpointError: a parameter of the checkpoint cannot be read.
        KeyError: the weights have no parameter of a name in the module.
    """
    for name, parameter in module.named_parameters():
        parameter.copy_(weights.read(name))


def _hf_weights(run: Run) -> HfWeights | None:
    if run.model.hf is None or run.model.hf_model is None:
        return None
    return HfWeights(run.model.hf_model, Path(run.model.hf))
