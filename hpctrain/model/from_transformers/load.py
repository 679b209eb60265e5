"""Builds a causal language model of transformers from the values of a config.json, without its weights and without any
code from the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.base.errors import InputError
from hpctrain.base.requirements import pip_install
from hpctrain.model.imported.user_error import describe_user_error
from hpctrain.records.format.document import LAYERS_MAX, SEQ_MAX, VOCAB_MAX, WIDTH_MAX

BUFFER_BYTES_MAX = 2**30
"""Largest size of a model's constants, such as tables of rotary angles, in bytes."""

_REFUSED = {
    "auto_map": "the folder's own code would have to run; hpctrain never runs code of a folder",
    "quantization_config": "quantised weights cannot be trained; save the model in bf16 or fp32",
}
"""Key of a config.json, at any depth, with which no model is built -> why."""
_CHOSEN_HERE = ("implementation", "kernel")
"""Parts of names of keys that are left out of a config.json, unless their value is a whole number such as that of
`conv_kernel`: transformers may fetch and run code for their values.
"""
_SIZES_MAX = {
    "num_hidden_layers": LAYERS_MAX,
    "hidden_size": WIDTH_MAX,
    "vocab_size": VOCAB_MAX,
    "max_position_embeddings": SEQ_MAX,
}
"""Attribute of a configuration of transformers -> the largest value that is allowed."""
COUNT_MAX = 2**16
"""Largest number of modules of one kind that a config.json may ask for."""
_DEPTH_MAX = 8


def import_transformers() -> Any:
    """Return the package transformers.

    Raises:
        InputError: the package is missing or cannot be imported.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise InputError(f"model.hf: transformers cannot be imported: {describe_user_error(error)}") from None
        raise InputError(
            f"model.hf: transformers has to build this model and is not installed here; {pip_install('transformers')}"
        ) from None
    except Exception as error:
        raise InputError(f"model.hf: transformers cannot be imported: {describe_user_error(error)}") from None
    return transformers


def model_class(config: Mapping[str, Any]) -> type[nn.Module]:
    """Return the causal language model of transformers that a config.json names.

    Raises:
        InputError: transformers is missing, or has no such causal language model.
    """
    transformers = import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kind, named = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or kind not in NAMES:
        raise InputError(
            f"model_type {kind!r:.60}: transformers {transformers.__version__} has no causal language model of this "
            "type"
        )
    if named and named != [NAMES[kind]]:
        raise InputError(f"architectures {named!r:.60}: the causal language model of {kind} is {NAMES[kind]}")
    named_class: type[nn.Module] = getattr(transformers, NAMES[kind])
    return named_class


def configuration(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object for the values of a config.json, after checks of these values.

    Values with which transformers would fetch or run other code are left out.

    Raises:
        InputError: transformers is missing or has no such model, a value is not allowed, or transformers refuses it.
    """
    kind = model_class(config)
    _check_values(config, 0)
    values = _without_choices(config)
    for key in ("architectures", "transformers_version", "torch_dtype", "dtype"):
        values.pop(key, None)
    values |= {"use_cache": False, "output_hidden_states": False, "output_attentions": False, "return_dict": True}
    try:
        made = kind.config_class(**values)  # type: ignore[attr-defined]
    except Exception as error:
        raise InputError(f"transformers refuses its values: {describe_user_error(error)}") from None
    for key, most in _SIZES_MAX.items():
        size = getattr(made, key, None)
        if isinstance(size, int) and not 0 < size <= most:
            raise InputError(f"{key}: found {size}; allowed: a whole number above 0, up to {most}")
    return made


def build_on_meta(config: Mapping[str, Any]) -> nn.Module:
    """Return the model of a config.json on torch's meta device, which takes no memory whatever the sizes are.

    Raises:
        InputError: the model cannot be built, or its constants are too large.
    """
    with torch.device("meta"):
        model = _built(config)
    constants = sum(buffer.nbytes for buffer in model.buffers())
    if constants > BUFFER_BYTES_MAX:
        raise InputError(f"its constants would take {constants} bytes; allowed: up to {BUFFER_BYTES_MAX}")
    return model


def build_with_constants(config: Mapping[str, Any]) -> nn.Module:
    """Return the model of a config.json with its weights on the meta device and its constants on the CPU. Call it only
    for a config.json that passed `build_on_meta`.

    Raises:
        InputError: the model cannot be built.
    """
    with _weights_on_meta():
        return _built(config)


def materialise(module: nn.Module) -> None:
    """Replace the parameters of a module that are on the meta device by uninitialised ones on the CPU; parameters that
    several modules share stay shared."""
    made: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                inner._parameters[name] = made[id(parameter)]


def _built(config: Mapping[str, Any]) -> nn.Module:
    kind = model_class(config)
    made = configuration(config)
    try:
        model: nn.Module = kind._from_config(made).float()  # type: ignore[attr-defined]
    except Exception as error:
        raise InputError(f"its class raised {describe_user_error(error)}") from None
    return model


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers in the `with` block on the meta device. Buffers get their values,
    which a checkpoint does not hold."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _check_values(value: Any, depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise InputError(f"found more than {_DEPTH_MAX} levels of keys")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is not None and key in _REFUSED:
                raise InputError(f"{key}: {_REFUSED[key]}")
            if "num_" in key and isinstance(inner, int) and inner > COUNT_MAX:
                raise InputError(f"{key}: found {inner!r:.60}; allowed: up to {COUNT_MAX}")
            _check_values(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, depth + 1)


def _without_choices(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_choices(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if type(value) is int or not any(part in key for part in _CHOSEN_HERE)
    }
