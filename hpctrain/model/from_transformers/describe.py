"""Describes the model of a Hugging Face folder that transformers has to build: finds its blocks and what comes before
and after them, checks that the model cut into stages computes what the whole model does, and measures its sizes.

Nothing is assumed about an architecture. Where a check fails, the folder is refused with the reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.hf.config import CONFIG_NAME
from hpctrain.hf.folder import (
    READABLE,
    StoredTensor,
    have_same_values,
    read_config,
    safetensors_in,
    stored_tensors,
    weights_sha256,
)
from hpctrain.hf.transformers_row import transformers_row
from hpctrain.model.from_transformers.load import (
    build_on_meta,
    build_with_constants,
    configuration,
    import_transformers,
)
from hpctrain.model.from_transformers.stage import TransformersPart
from hpctrain.model.imported.checks import largest_difference
from hpctrain.model.imported.describe import measured_sizes
from hpctrain.model.imported.model import block_containers, shapes_of
from hpctrain.model.imported.user_error import describe_user_error
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.hf_model import HfModel
from hpctrain.records.model.measured_stack import PartSizes
from hpctrain.records.model.transformers_spec import TransformersSpec

TOLERANCE = 1e-6
"""Largest allowed difference between the logits of the whole and of the cut model, in fp32, relative to the largest
logit."""
CHECK_TOKENS = 64
"""Most tokens of a sequence with which the whole and the cut model are compared."""


@dataclass(frozen=True)
class FolderRequest:
    """A Hugging Face folder whose model transformers is to build, and facts about the run."""

    folder: str
    because: str
    """Why the model is none of hpctrain's own families, in words."""
    seq_len: int
    seed: int


@dataclass
class _Observed:
    """What a pass of the whole model showed."""

    front: list[str] = field(default_factory=list)
    """Paths of the modules with weights that ran before the first block."""
    back: list[str] = field(default_factory=list)
    """Paths of the modules with weights that ran after the last block."""
    tuples: bool = False
    """Whether the blocks returned tuples."""


@torch.no_grad()
def describe_folder(request: FolderRequest) -> HfModel:
    """Return what the folder of a request holds.

    The weights in the folder are not read, but for tied ones that it holds twice. The checks run with random weights,
    of which all blocks share one set, so they take the memory of embedding, one block and head.

    Raises:
        FileError: a file is damaged, a tensor is missing or unknown, transformers lacks the model, or no cut is found.
        InputError: transformers is missing, or the folder has no safetensors files.
    """
    import_transformers()
    folder = Path(request.folder)
    config = read_config(folder)
    stored = {tensor.name: tensor for tensor in safetensors_in(folder)}
    try:
        spec = _spec(config, stored, request)
    except InputError as error:
        raise FileError(folder / CONFIG_NAME, [FieldError("", str(error))]) from None
    return HfModel(
        config=config, dims=spec, weights_sha256=weights_sha256(stored_tensors(folder, transformers_row(spec)))
    )


def _spec(config: Mapping[str, Any], stored: dict[str, StoredTensor], request: FolderRequest) -> TransformersSpec:
    torch.manual_seed(request.seed)
    layers = getattr(configuration(config), "num_hidden_layers", None)
    if not isinstance(layers, int) or layers > len(stored):
        raise InputError(f"num_hidden_layers: found {layers!r}; the folder has {len(stored)} tensors")
    model = build_on_meta(config)
    prefix = _check_stored(model, stored)
    container = _container(model)
    # From here on, sizes are those of tensors in the folder.
    whole = build_with_constants(config)
    weights = _shared_weights(whole, container)
    _set_weights(whole, weights)
    vocabulary = whole.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    tokens = torch.randint(0, vocabulary, (2, min(request.seq_len, CHECK_TOKENS)))
    # A model could treat its special tokens in another way than the others.
    special = [getattr(whole.config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")]
    for place, token in enumerate(special[: tokens.shape[1]]):
        if isinstance(token, int) and 0 <= token < vocabulary:
            tokens[0, place] = token
    seen = _Observed()
    logits = _observe(whole, container, tokens, seen)
    _check_causal(whole, tokens, logits)
    spec = _unmeasured(model, container, seen, request).model_copy(update={"prefix": prefix, "vocab": logits.shape[2]})
    pieces = _Pieces(config, spec, weights)
    difference = largest_difference(pieces.logits(tokens), logits)
    if not difference <= TOLERANCE:
        raise InputError(
            f"cut into stages, a {spec.architecture} computes something else than whole (largest relative difference "
            f"{difference:.2g}): its blocks exchange more than the hidden state"
        )
    return pieces.measured(request.seq_len)


def _unmeasured(model: nn.Module, container: str, seen: _Observed, request: FolderRequest) -> TransformersSpec:
    """Return the spec of a model, without its sizes.

    Raises:
        InputError: weights are shared in a way that no cut keeps.
    """
    inside = f"{container}.0."
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    none = PartSizes(parameters=0, flops=0, activation_bytes=0)
    return TransformersSpec(
        architecture=type(model).__name__,
        because=request.because,
        blocks=container,
        layers=len(list(model.get_submodule(container).children())),
        dim=1,
        front=seen.front,
        back=seen.back,
        front_tensors={name: shape for name, shape in shapes.items() if _owner(name) in seen.front},
        block_tensors={name.removeprefix(inside): shape for name, shape in shapes.items() if name.startswith(inside)},
        back_tensors={name: shape for name, shape in shapes.items() if _owner(name) in seen.back},
        tied_weights=_tied(model, seen),
        blocks_return_tuples=seen.tuples,
        seq_len=request.seq_len,
        vocab=2,
        front_sizes=none,
        block_sizes=none,
        back_sizes=none,
        weights_sha256=hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest(),
    )


def _owner(name: str) -> str:
    """Return the path of the module that has the weight of this name."""
    return name.rpartition(".")[0]


class _Pieces:
    """The model of a spec, cut behind every block, with the weights of the whole model."""

    def __init__(self, config: Mapping[str, Any], spec: TransformersSpec, weights: dict[str, nn.Parameter]) -> None:
        self._spec = spec

        def part(start: int, stop: int, first: bool, last: bool) -> TransformersPart:
            model = build_with_constants(config)
            _set_weights(model, weights)
            absent = spec.absent_modules(first=first, last=last)
            stage = StageBlocks(start, stop, first, last)
            return TransformersPart(model, spec.blocks, stage, absent, spec.blocks_return_tuples).eval()

        self._front = part(0, 0, True, False)
        self._middle = part(0, spec.layers, False, False)
        self._back = part(spec.layers, spec.layers, False, True)
        self._shared = {id(weights[name]) for name in spec.tied_weights}

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [batch, seq], computed by stages of one block each.

        Raises:
            InputError: a stage raises an error.
        """
        try:
            x = self._front(tokens)
            for index in range(self._spec.layers):
                x = self._one_block(index)(x)
            return self._back(x)
        except Exception as error:
            text = describe_user_error(error)
            raise InputError(f"cut into stages, a {self._spec.architecture} raised {text}") from error

    def measured(self, seq_len: int) -> TransformersSpec:
        """Return the spec with sizes measured with one sequence of this number of tokens.

        Raises:
            InputError: the model does not take so many tokens.
        """
        try:
            tokens = torch.zeros(1, seq_len, dtype=torch.long)
            hidden = self._front(tokens)
            with torch.enable_grad():
                sizes = {
                    "front_sizes": measured_sizes([self._front], tokens, set()),
                    "block_sizes": measured_sizes([self._one_block(0)], hidden, set()),
                    "back_sizes": measured_sizes([self._back], hidden, self._shared),
                }
        except Exception as error:
            raise InputError(
                f"with sequences of data.seq_len {seq_len} it raised {describe_user_error(error)}"
            ) from error
        return self._spec.model_copy(update={**sizes, "seq_len": seq_len, "dim": hidden.shape[2]})

    def _one_block(self, index: int) -> TransformersPart:
        self._middle.take_stage(StageBlocks(index, index + 1, False, False))
        return self._middle


def _check_stored(model: nn.Module, stored: dict[str, StoredTensor]) -> str:
    """Check that a folder has a model's tensors. Return the prefix of names ('model.', or '') that those in it lack.

    Args:
        model: the model, on the meta device.
        stored: name -> tensor of the folder.

    Raises:
        InputError: a tensor is missing, unknown, of another shape or of an unreadable type, or the model has constants
            that are saved with its weights.
    """
    every = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    constants = {name for name, _ in model.named_buffers()}
    persistent = sorted(constants & set(model.state_dict()))
    if persistent:
        raise InputError(
            f"{type(model).__name__} saves the constant {persistent[0]} with its weights; only weights are trained"
        )
    base = f"{getattr(model, 'base_model_prefix', '')}."
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    held: dict[str, StoredTensor] = {}
    mistakes = []
    for name, tensor in stored.items():
        known = name if name in every else f"{base}{name}"
        if known in every:
            held[known] = tensor
        elif not ({name, known} & constants or any(re.search(pattern, name) for pattern in patterns)):
            mistakes.append(f"tensor {name} is no part of a {type(model).__name__}")
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    for name, *others in names.values():
        copies = [known for known in (name, *others) if known in held]
        place = held[copies[0]] if copies else None
        if place is None:
            mistakes.append(f"there is no tensor {name}, which a {type(model).__name__} has")
        elif place.shape != every[name]:
            mistakes.append(f"tensor {name} has shape {list(place.shape)}; config.json says {list(every[name])}")
        elif place.dtype not in READABLE:
            mistakes.append(f"tensor {name} has numbers of type {place.dtype}; allowed: {', '.join(READABLE)}")
        else:
            different = [copy for copy in copies[1:] if not have_same_values(place, held[copy])]
            mistakes += [f"tensor {copy} differs from {copies[0]}, but config.json ties the two" for copy in different]
    if mistakes:
        more = f" ({len(mistakes) - 1} more are wrong)" * (len(mistakes) > 1)
        experts = any(".experts." in name for name in stored)
        hint = "; mixtures of experts are stored in other tensors than transformers trains" * experts
        raise InputError(f"{mistakes[0]}{more}{hint}")
    return "" if all(name in every or name in constants for name in stored) else base


def _container(model: nn.Module) -> str:
    """Return the path of the container of a model's blocks.

    Raises:
        InputError: there is not exactly one, or the blocks differ.
    """
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    containers = list(block_containers(model))
    paths = [path for path, count in containers if count == layers]
    if len(paths) != 1:
        names = ", ".join(f"{path} ({count})" for path, count in containers) or "none"
        raise InputError(f"it needs one list of {layers} blocks of one kind; found: {names}")
    first, *others = model.get_submodule(paths[0]).named_children()
    shapes = shapes_of(first[1])
    for name, block in others:
        if shapes_of(block) != shapes:
            other = sorted(set(shapes_of(block).items()) ^ set(shapes.items()))[0]
            raise InputError(f"block {name} is not like block {first[0]}: they differ in {other[0]} {list(other[1])}")
    return paths[0]


def _shared_weights(model: nn.Module, container: str) -> dict[str, nn.Parameter]:
    """Return name -> random weight for a model on the meta device. All blocks have the same weights."""
    made: dict[int, nn.Parameter] = {}
    named: dict[str, nn.Parameter] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        inside = name.removeprefix(f"{container}.")
        number, _, rest = inside.partition(".")
        if inside != name and number != "0":
            named[name] = named[f"{container}.0.{rest}"]
            continue
        if id(weight) not in made:
            value = torch.empty(weight.shape).normal_()
            made[id(weight)] = nn.Parameter(value * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1 + value / 10)
        named[name] = made[id(weight)]
    return named


def _set_weights(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    for path, module in model.named_modules(remove_duplicate=False):
        for name in list(module._parameters):
            known = f"{path}.{name}" if path else name
            if known in weights:
                module._parameters[name] = weights[known]


def _observe(model: nn.Module, container: str, tokens: Tensor, seen: _Observed) -> Tensor:
    """Return the logits of the whole model for tokens [batch, seq], and note in `seen` what ran before and after the
    blocks.

    Raises:
        InputError: the pass fails, or a module with weights runs neither before nor after the blocks.
    """
    blocks = list(model.get_submodule(container).children())
    inside = {id(module) for block in blocks for module in block.modules()}
    place = ["front"]
    calls: dict[str, set[str]] = {}
    hooks = [
        blocks[0].register_forward_pre_hook(lambda *_: place.__setitem__(0, "blocks")),
        blocks[-1].register_forward_hook(lambda *_: place.__setitem__(0, "back")),
        blocks[0].register_forward_hook(lambda _m, _x, output: setattr(seen, "tuples", isinstance(output, tuple))),
    ]
    for path, module in model.named_modules():
        if id(module) in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        if any(True for _ in module.children()):
            raise InputError(f"{path or 'the model'} has weights beside its modules; no cut around it is known")
        calls[path] = set()
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: calls[path].add(place[0])))
    try:
        logits = _logits(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    for path, places in calls.items():
        if places not in ({"front"}, {"back"}):
            raise InputError(f"the weights of {path} are used neither before nor after the blocks alone")
        (seen.front if places == {"front"} else seen.back).append(path)
    return logits


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    try:
        logits = model.eval()(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        raise InputError(f"transformers cannot run it: {describe_user_error(error)}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise InputError("its forward pass gives no logits [batch, seq, vocabulary]")
    if not torch.isfinite(logits).all():
        raise InputError("with random weights its logits are not finite, so no cut can be checked")
    return logits


def _check_causal(model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """Check that the logits of a position do not depend on later tokens.

    Raises:
        InputError: they do.
    """
    others = tokens.clone()
    others[:, -1] = (others[:, -1] + 1) % int(tokens.max() + 1)
    if not largest_difference(_logits(model, others)[:, :-1], logits[:, :-1]) < 1e-5:
        raise InputError("its logits depend on later tokens, so it cannot learn to predict the next one")


def _tied(model: nn.Module, seen: _Observed) -> dict[str, str]:
    """Return name of a weight of the back modules that is a weight of the front, too -> its name there.

    Raises:
        InputError: weights are shared in another way.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: names[id(weight)] for name, weight in every if names[id(weight)] != name}
    for name, other in tied.items():
        if _owner(name) not in seen.back or _owner(other) not in seen.front:
            raise InputError(
                f"{name} and {other} are one weight; only weights before and after the blocks may be shared"
            )
    return tied
