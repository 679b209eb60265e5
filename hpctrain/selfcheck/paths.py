"""The paths of the selfcheck: what each one runs, on how many processes and devices, and what to do when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.launch.small_run import BYTES_VOCABULARY, make_plan
from hpctrain.records.model.families import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.optimizer import Optimizer

SPEC = DecoderSpec(layers=4, dim=64, heads=4, vocab=BYTES_VOCABULARY)
SEQUENCES, SEQ_LEN = 8, 64
OPTIMIZER = Optimizer(lr=3e-3, warmup_steps=0, eps=1e-3)
"""Few steps must change the loss visibly. AdamW divides each gradient by its own size, so with a small eps the rounding
of a gradient near 0 would show in a parameter."""
REFERENCE = "train, one process"
"""Path whose losses are the reference of all plans."""

BUG = "attach the file of -o to a report of a bug"
DRIVER = "compare driver and torch: `hpctrain doctor`; a newer driver or a torch for an older CUDA helps"


@dataclass(frozen=True)
class Degrees:
    """How a path cuts the model."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: Literal[0, 1, 2, 3] = 0

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.tp

    def plan(self, devices: list[str]) -> Plan:
        """Return the plan of these degrees for a global batch of `SEQUENCES`.

        Args:
            devices: one 'node:device' for each rank.
        """
        share = SEQUENCES // self.dp
        return make_plan(self.pp, self.dp, SPEC.layers, share // 2, 2, tp=self.tp, zero=self.zero, devices=devices)


@dataclass(frozen=True)
class CheckedPath:
    """One path of the selfcheck that runs in processes of `hpctrain.worker check`."""

    name: str
    check: str
    """Name in `hpctrain.worker.checks.check.CHECKS`."""
    next_step: str
    """What to do if it fails or is slow."""
    device: Literal["cpu", "cuda"]
    world: int = 1
    degrees: Degrees | None = None
    """Degrees of the plan; None for a check that trains nothing."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of run.yaml that differ from the defaults of the small run."""
    reference: str | None = None
    """Path whose losses this one is compared with."""

    def devices(self) -> list[str]:
        """Return the device of each rank: GPUs of one node, or the CPUs of virtual nodes."""
        name = "local0:cuda{}" if self.device == "cuda" else "local{}:cpu0"
        return [name.format(rank) for rank in range(self.world)]


@dataclass(frozen=True)
class LeftOut:
    """A path that cannot run on this machine."""

    name: str
    reason: str


PLANS = {
    "ZeRO 0, dp 2": Degrees(dp=2),
    "ZeRO 1, dp 2": Degrees(dp=2, zero=1),
    "ZeRO 2, dp 2": Degrees(dp=2, zero=2),
    "ZeRO 3, dp 2": Degrees(dp=2, zero=3),
    "pipeline, pp 2": Degrees(pp=2),
    "tensor, tp 2": Degrees(tp=2),
}


def paths_of(gpus: int, compiles: bool) -> list[CheckedPath | LeftOut]:
    """Return all paths in the order in which they run.

    Args:
        gpus: visible GPUs of the node. Plans of two ranks use NCCL from two GPUs on; with fewer they run on CPUs with
            gloo, because NCCL refuses two ranks on one GPU.
        compiles: whether torch.compile has a compiler for the device.
    """
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    several: Literal["cpu", "cuda"] = "cuda" if gpus > 1 else "cpu"
    kind = {"cpu": "CPU", "cuda": "GPU"}[device]
    paths: list[CheckedPath | LeftOut] = [
        CheckedPath("fork server", "device", DRIVER, device),
        CheckedPath("attention kernels", "attention", DRIVER, device),
        CheckedPath(
            "compression", "compression", "if torch.topk is faster: is Triton there, and a C compiler?", device
        ),
        *_sums(gpus),
        CheckedPath(REFERENCE, "reference", BUG, "cpu", degrees=Degrees()),
    ]
    if gpus:
        paths.append(CheckedPath("train, one GPU", "plan", BUG, "cuda", 1, Degrees(), reference=REFERENCE))
    for name, degrees in PLANS.items():
        paths.append(CheckedPath(name, "plan", BUG, several, degrees.world, degrees, reference=REFERENCE))
    for precision in ("bf16", "fp16"):
        keys = {"precision": precision}
        paths.append(CheckedPath(f"train in {precision}", "precision", DRIVER, device, 1, Degrees(), keys, REFERENCE))
    if compiles:
        next_step = "set compile: false, or give torch a compiler (CXX, Triton)"
        paths.append(CheckedPath("compile", "compiled", next_step, device, 1, Degrees(), {"compile": True}, REFERENCE))
    else:
        paths.append(LeftOut("compile", f"torch has no compiler for the {kind} here"))
    paths.append(CheckedPath("checkpoint beside a step", "checkpoint", BUG, device, 1, Degrees()))
    return paths


def _sums(gpus: int) -> list[CheckedPath | LeftOut]:
    """Return the paths of collectives: NCCL on one GPU and between GPUs, gloo between processes."""
    name, several = "NCCL, one GPU", "NCCL between GPUs"
    nccl = "look for NCCL's warning in the error; NCCL_DEBUG=INFO tells more"
    paths: list[CheckedPath | LeftOut] = [
        CheckedPath("gloo, two processes", "all_reduce", "is the loopback interface up?", "cpu", 2)
    ]
    paths.append(CheckedPath(name, "all_reduce", nccl, "cuda") if gpus else LeftOut(name, "no GPU"))
    if gpus > 1:
        paths.append(CheckedPath(several, "all_reduce", nccl, "cuda", gpus))
    else:
        paths.append(LeftOut(several, "one device" if gpus else "no GPU"))
    return paths
