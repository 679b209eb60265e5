"""The `data` section of run.yaml: data for training, its mixture, and data for validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hpctrain.records.format.document import SEQ_MAX, Part
from hpctrain.records.format.file_name import AnyPath, OptionalPath, PathFromFile


class WeightedFolder(Part):
    """A training folder and its weight."""

    path: PathFromFile
    """Folder of token shards, made by `hpctrain data prepare`."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Share of the samples, relative to the sum of all weights."""


def _shape(value: object) -> str:
    """Return the name of the union's branch that a value belongs to. It is in parentheses, so that errors leave it out
    of key paths."""
    return "(mapping)" if isinstance(value, dict | Part) else "(plain)"


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
TrainFolder = Annotated[
    Annotated[PathFromFile, Tag("(plain)")] | Annotated[WeightedFolder, Tag("(mapping)")], Discriminator(_shape)
]
ValidFolders = Annotated[
    Annotated[list[PathFromFile], Tag("(plain)")] | Annotated[dict[SetName, PathFromFile], Tag("(mapping)")],
    Discriminator(_shape),
]


class Data(Part):
    """The corpus, prepared by `hpctrain data prepare`. Relative paths are relative to the run file's folder."""

    train: list[TrainFolder] = Field(min_length=1)
    """Folders of token shards to train on, shuffled together. Or a list of {path, weight}: samples are then drawn in
    proportion to the weights, whatever the sizes of the folders."""
    valid: ValidFolders = []
    """Folders of token shards for validation, used together. Default: the validation split that `data prepare` made. Or
    name -> folder: each folder then has a loss and a perplexity of its own, in addition to that split."""
    tokenizer: OptionalPath = None
    """Path of tokenizer.json. Default: the one in the first training folder."""
    seq_len: int = Field(default=256, ge=8, le=SEQ_MAX)
    """Tokens in a sequence."""
    stage: Literal["none", "node"] = "none"
    """none: workers read the folders in place. node: each node first copies them to its own disk, checks them against
    their index, and keeps them for its next run; a node without enough disk space reads them in place."""
    stage_folder: AnyPath | None = None
    """Folder on each node's own disk; the node expands '$USER' and other variables. Default: $SLURM_TMPDIR, else
    $TMPDIR, else /tmp."""

    @property
    def train_folders(self) -> list[str]:
        """The training folders without their weights."""
        return [item if isinstance(item, str) else item.path for item in self.train]

    @property
    def weights(self) -> list[float] | None:
        """Weights of the training folders; None: they are shuffled together."""
        weights = [item.weight for item in self.train if isinstance(item, WeightedFolder)]
        return weights or None

    @property
    def valid_folders(self) -> list[str]:
        """All validation folders that the file names."""
        return list(self.valid.values() if isinstance(self.valid, dict) else self.valid)

    @model_validator(mode="after")
    def _all_or_none_weighted(self) -> Data:
        plain = [item for item in self.train if isinstance(item, str)]
        if plain and len(plain) < len(self.train):
            raise ValueError(f"train: {plain[0]} has no weight and others have; give every folder one, or none")
        folders = self.train_folders
        twice = next((folder for folder in folders if folders.count(folder) > 1), None)
        if twice is not None and not plain:
            raise ValueError(f"train: {twice} is there twice; add its weights up")
        return self
