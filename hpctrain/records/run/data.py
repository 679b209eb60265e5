"""The `data` section of run.yaml: data for training, its mixture, and data for validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hpctrain.records.format.document import SEQ_MAX, Part
from hpctrain.records.format.file_name import AnyPath, OptionalPath, PathFromFile


class WeightedFolder(Part):
    """A corpus folder to train on, with its weight in a mixture."""

    path: PathFromFile
    """Corpus folder, made by `hpctrain data prepare`."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Weight of the folder; weight divided by the sum of all weights is the share of samples from this folder."""


def _shape(value: object) -> str:
    """Return which form a value of `train` or `valid` has: "(mapping)", or "(plain)" for a path or a list. Pydantic
    validates only that form. The parentheses tell `validation_errors` that the name is not a key of the file."""
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
    """Corpus folders to train on, shuffled together. Or a list of {path, weight}: samples are then drawn in proportion
    to the weights, whatever the sizes of the folders."""
    valid: ValidFolders = []
    """Corpus folders for validation, used together. Default: the validation split of the training folders. Or a mapping
    name -> folder: each folder then has a loss and a perplexity of its own, in addition to those of the validation
    split."""
    tokenizer: OptionalPath = None
    """Path of a tokenizer.json. Default: the tokenizer.json in the first training folder."""
    seq_len: int = Field(default=256, ge=8, le=SEQ_MAX)
    """Tokens in a sequence."""
    stage: Literal["none", "node"] = "none"
    """none: workers read the corpus folders in place. node: each node first copies the corpus folders to its own disk,
    checks the copies against their index, and keeps them for its next run; a node without enough disk space reads the
    folders in place."""
    stage_folder: AnyPath | None = None
    """With stage node: folder for the copies on each node's own disk. The node expands '$USER' and other variables.
    Default: $SLURM_TMPDIR, else $TMPDIR, else /tmp."""

    @property
    def train_folders(self) -> list[str]:
        """Return the paths of the training folders, without weights."""
        return [item if isinstance(item, str) else item.path for item in self.train]

    @property
    def weights(self) -> list[float] | None:
        """Return the weights of the training folders, in their order; None if the folders have no weights and are
        shuffled together."""
        weights = [item.weight for item in self.train if isinstance(item, WeightedFolder)]
        return weights or None

    @property
    def valid_folders(self) -> list[str]:
        """Return the paths of all validation folders that the run file names."""
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
