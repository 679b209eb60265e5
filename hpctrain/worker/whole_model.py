"""A run's whole model on one process, with the weights of a checkpoint of any plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from hpctrain.base.errors import InputError
from hpctrain.model.build import build_part
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.run.run import Run
from hpctrain.worker.weights import copy_weights, fill_of, weights_of


def whole_model(run: Run, checkpoint: Path | None) -> nn.Module:
    """Return the run's whole model on the CPU, in evaluation mode, with a checkpoint's weights. Parameters have the
    dtype that they have in training. The code of an imported model has to be on sys.path.

    Args:
        checkpoint: folder of a verified checkpoint; None: the model before training.

    Raises:
        InputError: an imported model cannot be built, or `model.hf` no longer has the run's first weights.
        CheckpointError: the checkpoint cannot be loaded.
    """
    spec = run.spec()
    return build_part(spec, StageBlocks(0, spec.layers, True, True), run.seed, fill_of(run, checkpoint)).eval()


def load_weights(model: nn.Module, run: Run, checkpoint: Path | None) -> None:
    """Copy the weights of a verified checkpoint, or without one those before training, into the model's parameters,
    which keep their device and their dtype.

    Raises:
        InputError: the model and the run's model have different parameters, or the weights before training cannot be
            made.
        CheckpointError: the checkpoint cannot be loaded.
    """
    weights = weights_of(run, checkpoint)
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    _check_alike(parameters, weights.shapes, "the run before training" if checkpoint is None else str(checkpoint))
    copy_weights(weights, model)


def _check_alike(model: dict[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Check that a model and the weights of a run have parameters of the same names and shapes.

    Args:
        model: name -> shape of the model's parameters.
        saved: name -> shape of the weights.
        where: what holds the weights, for errors.

    Raises:
        InputError: a parameter is missing in one of the two, or has another shape.
    """
    missing = [name for name in model if name not in saved]
    surplus = [name for name in saved if name not in model]
    other = [name for name in model if name in saved and model[name] != saved[name]]
    if not (missing or surplus or other):
        return
    if missing:
        words = f"it has no {missing[0]}, which the model has"
    elif surplus:
        words = f"it has {surplus[0]}, which the model has not"
    else:
        words = f"{other[0]} has the shape {list(saved[other[0]])}, in the model {list(model[other[0]])}"
    raise InputError(
        f"model: {where} is of another model: {words} ({len(missing) + len(surplus) + len(other)} parameters "
        "differ); leave the argument out, and the run's model is built"
    )


def check_code_is_of_run(spec: ImportedSpec, code: Path) -> None:
    """Check that this process has not imported the package of an imported model from elsewhere: Python would go on
    using that package instead of the run's code.

    Args:
        code: the run's copy of the user's code.

    Raises:
        InputError: the package was imported from another folder.
    """
    package = spec.factory.partition(":")[0].partition(".")[0]
    known = sys.modules.get(package)
    if known is None or (not (code / package).is_dir() and not (code / f"{package}.py").is_file()):
        return
    file = getattr(known, "__file__", None) or next(iter(getattr(known, "__path__", [])), "")
    if not Path(file).resolve().is_relative_to(code.resolve()):
        raise InputError(
            f"model.import: this process has imported {package} from {file}, and the run has its own copy in {code}; "
            "pass your model with model=..., or load the checkpoint in a new process"
        )
