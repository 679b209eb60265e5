"""The `model` section of run.yaml: which model is trained, and how a model from a user's own code is built."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from hpctrain.records.format.document import Part
from hpctrain.records.format.file_name import PathFromFile
from hpctrain.records.format.validation_errors import nearest
from hpctrain.records.model.families import PRESETS, FamilySpec
from hpctrain.records.model.hf_model import HfModel
from hpctrain.records.model.imported_spec import ImportedSpec, Split


class Model(Part):
    """The model that is trained: exactly one of the keys preset, dims, hf and import is given. Of the other keys,
    `found` is used only with hf, and the rest only with import."""

    preset: str | None = None
    """Name of a preset; `hpctrain docs models` lists the presets."""
    dims: Annotated[FamilySpec, Field(discriminator="family")] | None = None
    """A model by its dimensions; a decoder unless the key `family` says another one."""
    hf: PathFromFile | None = None
    """A Hugging Face model folder to start from: config.json and safetensors files."""
    hf_model: HfModel | None = Field(default=None, alias="found")
    """Written by hpctrain into the run folder's run.yaml: what the folder at `hf` holds."""
    import_: str | None = Field(default=None, alias="import")
    """A factory in your own code, 'package.module:factory': a function that returns the model."""
    args: dict[str, Any] | None = None
    """Keyword arguments of the factory. The factory also gets `vocabulary` and `seq_len` if it accepts them."""
    front: list[str] | None = Field(default=None, min_length=1)
    """Modules of your model from the tokens to the first block, applied in turn. Default: the modules before
    `blocks`."""
    blocks: str | None = None
    """The container of your model's repeated blocks: a ModuleList, ModuleDict or Sequential. Default: the model's only
    such container."""
    back: list[str] | None = Field(default=None, min_length=1)
    """Modules from the last block to the logits, applied in turn. Default: the modules after `blocks`."""
    tensor_parallel: dict[str, Split] | None = None
    """How tensor parallelism splits the linear layers of a block: name within the block -> columns or rows."""
    measured: ImportedSpec | None = None
    """Written by hpctrain into the run folder's run.yaml: the measured sizes of your model."""

    @model_validator(mode="after")
    def _one(self) -> Model:
        given = [key for key in ("preset", "dims", "hf", "import_") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of preset, dims, hf, import")
        import_keys = [
            key for key in ("args", "front", "blocks", "back", "tensor_parallel", "measured") if getattr(self, key)
        ]
        if import_keys and self.import_ is None:
            raise ValueError(f"{import_keys[0]} goes with import; found it with {given[0]}")
        if self.hf_model is not None and self.hf is None:
            raise ValueError(f"found goes with hf; found it with {given[0]}")
        return self

    @field_validator("dims", mode="before")
    @classmethod
    def _decoder_by_default(cls, value: Any) -> Any:
        return {"family": "decoder", **value} if isinstance(value, dict) else value

    @field_validator("import_")
    @classmethod
    def _factory(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:[\w.]+", value):
            raise ValueError("write it as package.module:factory")
        return value

    def is_measured(self, tokens: int, seq_len: int) -> bool:
        """Return whether `measured` was measured with the present settings of this section, with `tokens` as the size
        of the data's vocabulary, and with `seq_len` tokens in a sequence."""
        spec = self.measured
        return (
            spec is not None
            and (spec.factory, spec.args) == (self.import_, self.args or {})
            and spec.tensor_parallel == (self.tensor_parallel or {})
            and self.front in (None, spec.front)
            and self.blocks in (None, spec.blocks)
            and self.back in (None, spec.back)
            and (spec.tokens, spec.seq_len) == (tokens, seq_len)
        )

    @field_validator("preset")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(nearest(value, PRESETS))
        return value
