"""The `Architecture` of a model that transformers builds, made from the model's `TransformersSpec`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.hf.architecture import Architecture
from hpctrain.hf.tensors import HfTensor
from hpctrain.records.model.transformers_spec import TransformersSpec


def transformers_row(spec: TransformersSpec) -> Architecture:
    """Return the architecture of a model whose parameters are the tensors of its folder. The parameters have the names
    of the tensors; if the folder leaves out a prefix, the names of the parameters begin with it."""
    renamed: tuple[tuple[str, str], ...] = ()
    if spec.prefix:
        outside = "|".join(map(re.escape, [*spec.front_tensors, *spec.back_tensors, *spec.tied_weights]))
        renamed = ((rf"^(?!{re.escape(spec.blocks)}\.|(?:{outside})$)", spec.prefix),)
    return Architecture(spec.architecture, "", TransformersSpec, (), _tensors, renamed=renamed)


def _tensors(spec: TransformersSpec) -> Iterator[HfTensor]:
    second_names = {name: (other,) for other, name in spec.tied_weights.items()}
    for name, shape in spec.tensors():
        yield HfTensor(name, tuple(shape), (name,), instead=second_names.get(name, ()))
