"""site.yaml: settings that you write once for each cluster, instead of in every run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from hpctrain.records.format.document import Document, OneOrSeveral, Part
from hpctrain.records.format.yaml_file import read_yaml_model
from hpctrain.records.run.cluster import Cluster

FILE = Path("hpctrain") / "site.yaml"
"""Path below $XDG_CONFIG_HOME, by default ~/.config (XDG Base Directory Specification)."""
RUN_ONLY_KEYS = ("after", "after_end", "nodes", "groups", "time")
"""Keys of `cluster` that belong to a single run; site.yaml may not set them."""


class SiteProfile(Part):
    """Defaults for one cluster."""

    match: OneOrSeveral[str] = Field(default=[], json_schema_extra={"type": ["array", "string"]})
    """Slurm's name of the cluster (ClusterName), or names of login hosts, with * for any text. Default: any cluster."""
    cluster: Cluster
    """Values for keys that a run file's `cluster` leaves out."""

    @field_validator("cluster")
    @classmethod
    def _of_the_site(cls, value: Cluster) -> Cluster:
        run_only = [key for key in RUN_ONLY_KEYS if key in value.model_fields_set]
        if run_only:
            raise ValueError(
                f"{run_only[0]} belongs into a run file; here go partition, account, qos, setup and the like"
            )
        return value

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the profile's values as a mapping with the keys of a run file."""
        return {"cluster": self.cluster.model_dump(mode="json", by_alias=True, exclude_unset=True)}


class Site(Document):
    """Your defaults, by cluster."""

    schema_kind: ClassVar[str] = "site"

    profiles: dict[str, SiteProfile] = Field(min_length=1)
    """Profiles by name. If several match the cluster, the first one is used."""

    def matching(self, names: Sequence[str]) -> str | None:
        """Return the name of the first profile that matches one of these cluster or host names, or None."""
        for name, profile in self.profiles.items():
            if not profile.match or any(fnmatchcase(here, form) for here in names for form in profile.match):
                return name
        return None


def site_file(environ: Mapping[str, str]) -> Path:
    """Return the path of site.yaml, whether or not it exists."""
    base = environ.get("XDG_CONFIG_HOME") or ""
    # The specification requires that relative paths are ignored.
    return (Path(base) if base.startswith("/") else Path(environ.get("HOME", "~")).expanduser() / ".config") / FILE


def read_site(path: Path) -> Site | None:
    """Read site.yaml; None where it does not exist.

    Raises:
        FileError: the file is not YAML, or has errors; all are listed with their lines.
    """
    if not path.exists():
        return None
    return read_yaml_model(path, Site, "profiles: {NAME: {match: …, cluster: {…}}}")
