"""The `data` section of run.yaml: what is trained on, in which shares, and what is validated on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hpctrain.records.format.bounds import SEQ_MAX
from hpctrain.records.format.document import Part
from hpctrain.records.format.file_name import AnyPath


class WeightedFolder(Part):
    """A training folder with its share of the samples."""

    path: AnyPath
    """Folder of token shards."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Its share is this, divided by the sum of all weights."""


def _shape(value: object) -> str:
    """The branch that a value is read as. In parentheses: part of no key path that a person is shown."""
    return "(mapping)" if isinstance(value, dict | Part) else "(plain)"


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
TrainFolder = Annotated[
    Annotated[AnyPath, Tag("(plain)")] | Annotated[WeightedFolder, Tag("(mapping)")], Discriminator(_shape)
]
ValidFolders = Annotated[
    Annotated[list[AnyPath], Tag("(plain)")] | Annotated[dict[SetName, AnyPath], Tag("(mapping)")],
    Discriminator(_shape),
]


class Data(Part):
    """The corpus, prepared by `hpctrain data prepare`. Relative paths start at the run file's folder."""

    train: list[TrainFolder] = Field(min_length=1)
    """Folders of token shards to train on, shuffled together; or each with a weight, {path, weight}: samples are then
    drawn in that proportion, whatever the folders' sizes."""
    valid: ValidFolders = []
    """Folders of token shards for validation, taken together. Default: the validation part that `data prepare` kept
    aside. Or a folder for each name: every one has a loss and a perplexity of its own, beside that part."""
    tokenizer: AnyPath | None = None
    """tokenizer.json. Default: the one that lies in the first training folder."""
    seq_len: int = Field(default=256, ge=8, le=SEQ_MAX)
    """Tokens in a sequence."""
    stage: Literal["none", "node"] = "none"
    """none: workers read the folders where they are. node: each node copies them to its own disk first, checks them
    against their index, and keeps them for its next run; without the room it reads them where they are."""
    stage_folder: AnyPath | None = None
    """Folder on each node's own disk; '$USER' and the like are filled in there. Default: $SLURM_TMPDIR, else $TMPDIR,
    else /tmp."""

    @property
    def train_folders(self) -> list[str]:
        """The training folders without their weights."""
        return [item if isinstance(item, str) else item.path for item in self.train]

    @property
    def weights(self) -> list[float] | None:
        """What the training folders are drawn in proportion to; None: they are shuffled together."""
        weights = [item.weight for item in self.train if isinstance(item, WeightedFolder)]
        return weights or None

    @property
    def valid_folders(self) -> list[str]:
        """All folders that are named for validation."""
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

    def resolved(self, base: Path) -> Data:
        """The same with relative paths taken from that folder."""

        def absolute(path: str) -> str:
            return str(base / Path(path).expanduser())

        train = [
            absolute(item) if isinstance(item, str) else item.model_copy(update={"path": absolute(item.path)})
            for item in self.train
        ]
        valid = (
            {name: absolute(folder) for name, folder in self.valid.items()}
            if isinstance(self.valid, dict)
            else [absolute(folder) for folder in self.valid]
        )
        tokenizer = absolute(self.tokenizer) if self.tokenizer else None
        return self.model_copy(update={"train": train, "valid": valid, "tokenizer": tokenizer})
