"""What is said of an image, from what was seen inside and outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.container.check import (
    REQUIRED_PACKAGES,
    HostEnvironment,
    ImageExamination,
    ImageFinding,
    check_image,
    worst_level,
)

TORCH: dict[str, Any] = {"version": "2.13.0", "cuda": None, "hip": None, "gloo": True, "nccl": None, "devices": 0}
INSIDE: dict[str, Any] = {
    "python": "3.11.2",
    "packages": {"submitit": "1.5.4", "cloudpickle": "3.1.2", **dict.fromkeys(REQUIRED_PACKAGES, "1")},
    "torch": TORCH, "infiniband": [], "nvidia": False, "home": None, "temporary": None, "shared_memory": None,
}  # fmt: skip
OUTSIDE = HostEnvironment("3.11.7", {"submitit": "1.5.4", "cloudpickle": "3.1.2"}, None, (), ())
SEEN = ImageExamination(INSIDE, ("SIGTERM", "SIGUSR2"), True, (1.0, 0.5), "lustre")
CUDA = {**TORCH, "cuda": "12.8", "nccl": "2.21.5", "devices": 4}
GPU_INSIDE = {**INSIDE, "torch": CUDA, "nvidia": True}


def named(outside: HostEnvironment, seen: ImageExamination) -> dict[str, ImageFinding]:
    return {finding.name: finding for finding in check_image(outside, seen)}


def test_an_image_that_fits_is_ok() -> None:
    found = check_image(OUTSIDE, SEEN)
    assert worst_level(found) == "ok"
    assert named(OUTSIDE, SEEN)["start"].value == "1.00 s, then 0.50 s, from lustre"


@pytest.mark.parametrize(
    ("name", "level", "outside", "seen"),
    [
        ("python", "problem", replace(OUTSIDE, python="3.12.1"), SEEN),
        ("submitit", "problem", replace(OUTSIDE, packages={"submitit": "1.5.3", "cloudpickle": "3.1.2"}), SEEN),
        ("packages", "problem", OUTSIDE, replace(SEEN, inside={**INSIDE, "packages": {"submitit": "1.5.4"}})),
        ("torch", "problem", OUTSIDE, replace(SEEN, inside={**INSIDE, "torch": {"error": "ImportError: libcudart"}})),
        ("gloo", "problem", OUTSIDE, replace(SEEN, inside={**INSIDE, "torch": {**TORCH, "gloo": False}})),
        ("infiniband", "problem", replace(OUTSIDE, infiniband=("uverbs0",)), SEEN),
        ("home", "note", OUTSIDE, replace(SEEN, inside={**INSIDE, "home": "/home/me: Read-only file system"})),
        ("temporary", "problem", OUTSIDE, replace(SEEN, inside={**INSIDE, "temporary": "/tmp: No space"})),
        ("environment", "problem", replace(OUTSIDE, contained=("APPTAINER_COMPAT",)), SEEN),
        ("signals", "problem", OUTSIDE, replace(SEEN, signals=("SIGTERM",))),
        ("signals", "problem", OUTSIDE, replace(SEEN, survived=False)),
        ("start", "note", OUTSIDE, replace(SEEN, starts_s=(30.0, 9.0))),
        ("driver", "note", OUTSIDE, replace(SEEN, inside=GPU_INSIDE)),
        ("driver", "problem", replace(OUTSIDE, driver="470.82.01"), replace(SEEN, inside=GPU_INSIDE)),
        ("driver", "ok", replace(OUTSIDE, driver="535.104.05"), replace(SEEN, inside=GPU_INSIDE)),
        ("GPUs", "problem", replace(OUTSIDE, driver="580.1"), replace(SEEN, inside={**GPU_INSIDE, "nvidia": False})),
        ("NCCL", "problem", replace(OUTSIDE, driver="580.1"),
         replace(SEEN, inside={**GPU_INSIDE, "torch": {**CUDA, "nccl": None}})),
    ],
)  # fmt: skip
def test_each_thing_that_does_not_fit_is_named(
    name: str, level: str, outside: HostEnvironment, seen: ImageExamination
) -> None:
    finding = named(outside, seen)[name]
    assert finding.level == level
    assert finding.words or level == "ok"
