"""DCP folders whose tensors have the names and shapes that transformers gives them, as `hpctrain export --format dcp`
writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.hf.convert.layout import ModelTensors
from hpctrain.hf.convert.torch_file import LazyTensor

KNOWN = (
    "model.embed_tokens.weight", "transformer.wte.weight", "wte.weight", "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight", "bert.embeddings.word_embeddings.weight",
    "roberta.embeddings.word_embeddings.weight", "shared.weight",
)  # fmt: skip
"""Names of the embedding in the families that transformers and hpctrain have."""


class TransformersLayout:
    """Tensors under the names of transformers. They are copied, and config.json is the one that the user gives."""

    tool = "transformers"
    needed: tuple[str, ...] = ("model_type",)
    may_shrink: tuple[str, ...] = ()

    def __init__(self, model: ModelTensors) -> None:
        self._model = model

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return no keys of config.json, because their names depend on the `model_type` of transformers."""
        return {}

    def tensors(self, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
        """Return all tensors of the model."""
        return self._model.by_name
