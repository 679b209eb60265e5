"""The paths of the selfcheck: what each path runs, on how many processes and devices, and what to do if it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.launch.small_run import BYTES_VOCABULARY, make_plan
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.optimizer import Optimizer

SPEC = DecoderSpec(layers=4, dim=64, heads=4, vocab=BYTES_VOCABULARY)
"""The small model that the paths train."""
SEQUENCES, SEQ_LEN = 8, 64
OPTIMIZER = Optimizer(lr=3e-3, warmup_steps=0, eps=1e-3)
"""AdamW for the small model. Few steps must change the loss visibly, so the learning rate is high. AdamW divides
each gradient by its own size, so with a smaller eps the rounding of a gradient near 0 would show in a parameter."""
REFERENCE = "train, one process"
"""Name of the path whose losses all other training paths are compared with."""

BUG = "attach the file of -o to a report of a bug"
"""Next step if a path fails that should work on every machine."""
DRIVER = "compare driver and torch: `hpctrain doctor`; a newer driver or a torch for an older CUDA helps"
"""Next step if a path fails that depends on the GPU's driver."""


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism and the ZeRO level of the plan by which a path of the selfcheck trains."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: Literal[0, 1, 2, 3] = 0

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.tp

    def plan(self, devices: list[str]) -> Plan:
        """Return the plan with these degrees for the small model and a global batch of `SEQUENCES` sequences.

        Args:
            devices: one 'node:device' for each rank.
        """
        share = SEQUENCES // self.dp
        return make_plan(self.pp, self.dp, SPEC.layers, share // 2, 2, tp=self.tp, zero=self.zero, devices=devices)


@dataclass(frozen=True)
class CheckedPath:
    """A path of the selfcheck that runs in processes of `hpctrain.worker check`."""

    name: str
    check: str
    """Name in `hpctrain.worker.checks.check.CHECKS`."""
    next_step: str
    """What the user should do if the path fails or is slow."""
    device: Literal["cpu", "cuda"]
    world: int = 1
    """Number of processes, one for each rank."""
    degrees: Degrees | None = None
    """Degrees of the plan; None for a check that trains nothing."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of run.yaml for the path's run that differ from the defaults of `launch.small_run.make_run`."""
    reference: str | None = None
    """Name of the path whose losses this path's losses are compared with; None: no comparison."""

    def devices(self) -> list[str]:
        """Return the device id of each rank: GPUs of one node, or CPUs of virtual nodes."""
        name = "local0:cuda{}" if self.device == "cuda" else "local{}:cpu0"
        return [name.format(rank) for rank in range(self.world)]


@dataclass(frozen=True)
class LeftOut:
    """A path that cannot run on this machine, and the reason."""

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
"""Name of a path -> the degrees of the plan that it trains by."""


def paths_of(gpus: int, compiles: bool) -> list[CheckedPath | LeftOut]:
    """Return all paths of a machine, in the order in which they run.

    Args:
        gpus: GPUs of the node that this process may use. Plans of two ranks use NCCL on two GPUs or more. With fewer
            GPUs they run on CPUs with gloo, because NCCL refuses two ranks on one GPU.
        compiles: whether there is a C++ compiler, which torch.compile needs.
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
    """Return the paths of collectives: gloo between processes, NCCL on one GPU and between GPUs."""
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
