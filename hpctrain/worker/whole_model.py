"""A run's whole model on one process, with the weights of a checkpoint of any plan."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpctrain.base.errors import InputError
from hpctrain.checkpoint.save_and_load import load
from hpctrain.model.build import build_stage
from hpctrain.records.model.imported_spec import ImportedSpec
from hpctrain.records.run.run import Run

PREFIX = "model."
"""Before the name of a parameter in a checkpoint; other tensors of a checkpoint are the optimizer's."""


def whole_model(run: Run, checkpoint: Path) -> nn.Module:
    """Return the run's whole model on the CPU, in evaluation mode, with a checkpoint's weights in the dtype in which
    they were saved. The code of an imported model has to be on sys.path.

    Args:
        checkpoint: folder of a verified checkpoint.

    Raises:
        InputError: an imported model cannot be built.
        CheckpointError: the checkpoint cannot be loaded.
    """
    spec = run.spec()
    model = build_stage(spec, 0, spec.layers, run.seed)
    load_weights(model, checkpoint)
    return model.eval()


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Copy the weights of a verified checkpoint into the model's parameters, which keep their device and their dtype.

    Raises:
        InputError: parameters of the model are not in the checkpoint, or have other shapes there.
        CheckpointError: the checkpoint cannot be loaded.
    """
    parameters = {f"{PREFIX}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    saved = _saved_weights(checkpoint)
    _check_alike(parameters, saved, checkpoint)
    # torch reads into tensors of the saved dtype only.
    read = {
        name: tensor
        if tensor.dtype == saved[name].properties.dtype and tensor.device.type == "cpu"
        else torch.empty(tensor.shape, dtype=saved[name].properties.dtype)
        for name, tensor in parameters.items()
    }
    with warnings.catch_warnings():
        # torch warns that one process loads alone, as if that were a mistake.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(read, checkpoint, None)
    for name, tensor in parameters.items():
        if read[name] is not tensor:
            tensor.copy_(read[name])


def _saved_weights(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: entry
        for name, entry in entries.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }


def _check_alike(parameters: dict[str, Tensor], saved: dict[str, TensorStorageMetadata], checkpoint: Path) -> None:
    """Check that model and checkpoint have the same parameters.

    Raises:
        InputError: a parameter is missing in one of the two, or has another shape.
    """
    missing = [name for name in parameters if name not in saved]
    surplus = [name for name in saved if name not in parameters]
    other = [name for name in parameters if name in saved and parameters[name].shape != saved[name].size]
    if not (missing or surplus or other):
        return
    if missing:
        words = f"it has no {missing[0].removeprefix(PREFIX)}, which the model has"
    elif surplus:
        words = f"it has {surplus[0].removeprefix(PREFIX)}, which the model has not"
    else:
        shapes = f"{list(saved[other[0]].size)}, in the model {list(parameters[other[0]].shape)}"
        words = f"{other[0].removeprefix(PREFIX)} has the shape {shapes}"
    raise InputError(
        f"model: {checkpoint} is of another model: {words} ({len(missing) + len(surplus) + len(other)} parameters "
        "differ); leave the argument out, and the run's model is built"
    )


def check_code_is_of_run(spec: ImportedSpec, code: Path) -> None:
    """Check that the package of an imported model is not imported in this process from elsewhere, which Python would
    use instead of the run's code.

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
