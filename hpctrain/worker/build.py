"""Builds the objects of one rank from a plan: process group, mesh, pipeline, reducer, optimizer, data, checkpoints.

A checkpoint holds the reducers' state too: the tensors of each rank, named by the rank's mesh coordinate.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.agent.worker_messages import StartOrder
from hpctrain.base.activity import ACTIVITY
from hpctrain.base.system.core_sets import take_core_set
from hpctrain.checkpoint.load import CheckpointReader
from hpctrain.checkpoint.memory.live_state import LiveState
from hpctrain.checkpoint.memory.restore import RestoredState
from hpctrain.checkpoint.memory.snapshots import SnapshotRing
from hpctrain.checkpoint.save import CheckpointSaver
from hpctrain.checkpoint.state import collect, prepare_moments, set_optimizer_step
from hpctrain.compress.reducers.reducer import Reducer
from hpctrain.parallel.gradient_reducer import build_plan_reducer
from hpctrain.parallel.loss import LossScaler
from hpctrain.parallel.mesh import Coordinate, build_mesh
from hpctrain.parallel.pipeline import Pipeline, PipelineInputs, build_pipeline
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.history.generation import GENERATIONS, Fence
from hpctrain.records.history.manifest import LossScale, Manifest
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run, run_of
from hpctrain.schedule.resolve import schedule_of
from hpctrain.schedule.runnable import check_runnable
from hpctrain.worker.batch_loader import BatchLoader, open_batch_loaders
from hpctrain.worker.state_memory import StateMemory, starts_later
from hpctrain.worker.store import open_store
from hpctrain.worker.weights import first_fill

CUBLAS_WORKSPACE = ":4096:8"
"""Value of CUBLAS_WORKSPACE_CONFIG: the faster of the two settings with which cuBLAS is deterministic."""


def make_deterministic() -> None:
    """Make torch choose deterministic algorithms. Call this before anything runs on a CUDA device.

    An operation without a deterministic algorithm raises an error that names it. The order of samples, the initial
    weights and sums over ranks need no setting: under one and the same plan they are always deterministic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Nothing here reads memory before it is written, and filling it would delay each start of a worker.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _keep(stage: nn.Module) -> None:
    """Leave a new stage's weights uninitialised: all of them come from the state that the worker starts from."""


def peak_memory_bytes(device: torch.device) -> float:
    """Return the peak memory of this worker in bytes: on a CUDA device what torch's allocator held, on a CPU the
    resident memory without pages of files.

    The allocator holds more than the tensors take, and no other process can use what it holds. The resident peak is
    VmHWM in /proc/self/status, because the peak of getrusage(2) begins with that of the parent process. The pages of
    files that are mapped now (RssFile) are subtracted: libraries, of which Triton alone has 64 MiB, and what was read
    of the corpus. The workers of a node share these pages, and the kernel drops them where memory is short.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    status = Path("/proc/self/status").read_text()
    kib = dict(re.findall(r"^(VmHWM|RssFile):\s+(\d+) kB", status, re.MULTILINE))
    return (float(kib["VmHWM"]) - float(kib["RssFile"])) * 1024


def reducer_state_tensors(reducer: Reducer, place: Coordinate) -> dict[str, Tensor]:
    """Return name in a checkpoint -> tensor of the reducer's state. The tensors share the reducer's memory.

    Args:
        place: this rank's mesh coordinate, which the names begin with.
    """
    return {_prefix(place) + key: tensor for key, tensor in reducer.state().items()}


def restore_reducer_state(
    reducer: Reducer,
    place: Coordinate,
    plan: Plan,
    manifest: Manifest,
    reader: CheckpointReader,
    group: dist.ProcessGroup,
) -> str | None:
    """Load the state that this rank's reducer had when the checkpoint was written. Collective over all ranks.

    A residual belongs to a rank's batches and its part of the model. It can be restored only if the ranks, their parts
    of the model and the codec are those of the checkpoint; the devices may differ.

    Args:
        place: this rank's mesh coordinate.
        manifest: the checkpoint's manifest.
        reader: reader of the checkpoint.
        group: the ranks that load together.

    Returns:
        Why the state in the checkpoint was not loaded; None if it was loaded or there is none.

    Raises:
        CheckpointError: a tensor of the state cannot be read, or has another shape than the reducer expects.
    """
    if manifest.reduction_sha256 is None:
        return None
    if manifest.reduction_sha256 != plan.reduction_sha256:
        return (
            f"the checkpoint of step {manifest.step} is of another layout of ranks or another compression: what they "
            "had not sent yet of their gradients is dropped"
        )
    if not plan.codec.has_state:
        return f"the checkpoint of step {manifest.step} has residuals, which {plan.codec.label} no longer keeps"
    reducer.load_state(reader.load_with_prefix(_prefix(place), group))
    return None


def _prefix(place: Coordinate) -> str:
    return f"compression.{place.pp}-{place.dp}-{place.tp}."


AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of a run -> dtype for torch's autocast; None: no autocast."""
STORE_TIMEOUT_S = 60
WRITER_TIMEOUT_S = 1800
"""Seconds that the writer threads of checkpoints wait for each other.

The limit is long, because training goes on while a checkpoint is written, and the file system may be slow.
"""


def collective_timeout(run: Run) -> timedelta:
    """Return how long a rank waits for the other ranks in one collective.

    The time-out is a last resort: the agents, which see all ranks, end a hung generation earlier and know which rank
    is to blame.
    """
    return timedelta(seconds=2 * run.step_timeout_s)


@dataclass
class Trainer:
    """All that the training loop of one rank works with: run, plan, part of the model, optimizer, data, and the
    steps done."""

    run: Run
    plan: Plan
    coordinate: Coordinate
    generation: int
    folder: Path
    """The run folder."""
    device: torch.device
    mesh: DeviceMesh
    pipeline: Pipeline
    parameters: list[nn.Parameter]
    """This rank's parameters that the optimizer updates, in the order of the reducer's gradients."""
    optimizer: torch.optim.Optimizer
    reducer: Reducer
    train: BatchLoader
    valid: dict[str, BatchLoader]
    """Loaders of the validation sets by name; the key of a set without a name is `UNNAMED_SET`."""
    saver: CheckpointSaver
    fence: Fence
    step: int
    """Number of steps done."""
    base_bytes: float
    """Peak memory in bytes of this worker before it built the model."""
    scaler: LossScaler | None = None
    """The loss scale; only with precision fp16."""
    past_scale: LossScale | None = None
    """Loss scale of the state that this worker started from, if the state comes from training in fp16; else None. It
    counts the steps that were skipped, which the optimizer does not count."""
    residuals_dropped: str | None = None
    """Which residuals of the state that the worker started from were not restored, and why; None if all were, or if
    there are none."""
    live: LiveState | None = None
    """The state in memory that outlives this process; None: parameters and moments are this process's alone."""
    ring: SnapshotRing | None = None
    """The snapshots of the state in memory, here and on other nodes; None: none are made."""
    from_memory: bool = False
    """Whether the trainer started from state in memory. A checkpoint of that step may be missing."""
    restored_row: MetricRow | None = None
    """With state in memory: the restored step's row of metrics.jsonl, which the file may lack; None: not known."""

    @property
    def rows(self) -> tuple[int, int]:
        """Return (index of this replica's first sequence in a global batch, number of its sequences)."""
        start = sum(replica.sequences for replica in self.plan.replicas[: self.coordinate.dp])
        return start, self.pipeline.sequences


def build(folder: Path, order: StartOrder) -> Trainer:
    """Join the generation's process group and return the trainer with this rank's part of the plan. Collective over all
    ranks.

    Args:
        folder: the run folder.
        order: the agent's order to start, with the plan, this rank's number and the address of the store.

    Raises:
        InputError: the run file, the plan, the data or the weights of `model.hf` cannot be used, or the user's model
            cannot be built.
        CheckpointError: the checkpoint cannot be loaded, or the state in memory cannot (`MemoryUnusableError`).
        RuntimeError: the ranks have not found each other in time, or have lost one (an error of torch.distributed).
    """
    run = run_of(folder)
    plan = Plan.read(folder / order.plan, owned=True)
    if run.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if run.tf32 else "highest")
    device = _device(plan.ranks[order.rank])
    timeout = collective_timeout(run)
    with ACTIVITY.doing("join the process group", waits="world"):
        _join(order, plan, device, timeout)
    base_bytes = peak_memory_bytes(device)
    coordinate = Coordinate.of(plan, order.rank)
    mesh = build_mesh(plan, device.type, timeout)
    schedule, _ = schedule_of(plan, coordinate.dp)
    check_runnable(plan, run)
    scaler = LossScaler(LossScale()) if run.precision == "fp16" else None
    inputs = PipelineInputs(
        plan, run.spec(), schedule, run.data.seq_len, run.seed, device, AUTOCAST[run.precision], scaler, run.compile,
        timeout=timeout, objective=run.effective_objective(), fill=_keep if starts_later(order) else first_fill(run),
    )  # fmt: skip
    pipeline = build_pipeline(inputs, mesh, coordinate)
    optimizer = _optimizer(run, pipeline, plan)
    named = pipeline.parameters()
    prepare_moments(named, optimizer, fill=not starts_later(order))
    # A separate group: the collectives of the writer thread must not mix with those of training.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITER_TIMEOUT_S))
    with ACTIVITY.doing("load the checkpoint", waits="world"):
        manifest = dropped = None
        memory = StateMemory.open(order, folder, run, plan, pipeline, optimizer, group)
        restored = memory.restore() if memory is not None else None
        if restored is None and order.restore is not None:
            reader = CheckpointReader(folder / order.restore)
            manifest = reader.manifest
            reader.load(collect(named, optimizer), group)
            restored = RestoredState(manifest.step, manifest.loss_scale)
        if restored is not None:
            _set_progress(restored, named, optimizer, scaler)
        # Residuals must not contain the loss scale or an overflow, so these sums begin when both are known.
        late = scaler is not None and plan.codec.has_state
        reducer = build_plan_reducer(plan, mesh, pipeline, "never" if late else "faster")
        if manifest is not None:
            dropped = restore_reducer_state(reducer, coordinate, plan, manifest, reader, group)
        elif memory is not None:
            dropped = memory.restore_reducer(reducer)
        if memory is not None:
            memory.commit(restored or RestoredState(0, scaler.state if scaler is not None else None), reducer)
    fence = Fence(folder / GENERATIONS, order.generation)
    saver = CheckpointSaver(folder / "checkpoints", group, run.checkpoint.keep, fence)
    train, valid = open_batch_loaders(run, device, os.environ)
    return Trainer(
        run=run,
        plan=plan,
        coordinate=coordinate,
        generation=order.generation,
        folder=folder,
        device=device,
        mesh=mesh,
        pipeline=pipeline,
        parameters=[parameter for _, parameter in named],
        optimizer=optimizer,
        reducer=reducer,
        train=train,
        valid=valid,
        saver=saver,
        fence=fence,
        step=restored.step if restored is not None else 0,
        base_bytes=base_bytes,
        scaler=scaler,
        past_scale=restored.loss_scale if restored is not None else None,
        residuals_dropped=dropped,
        live=memory.live if memory is not None else None,
        ring=memory.open_ring(run) if memory is not None else None,
        from_memory=restored is not None and manifest is None,
        restored_row=restored.row if restored is not None else None,
    )


def _device(device_id: DeviceId) -> torch.device:
    """Return the device with this name, and keep this process to it: to the GPU, or to the device's core set."""
    if device_id.device.startswith("cuda"):
        device = torch.device("cuda", int(device_id.device.removeprefix("cuda")))
        torch.cuda.set_device(device)
        return device
    if (index := device_id.device.removeprefix("cpu")).isdecimal():
        take_core_set(int(index))
    return torch.device("cpu")


def _join(order: StartOrder, plan: Plan, device: torch.device, timeout: timedelta) -> None:
    """Join the generation's process group. The ranks find each other by a store, which rank 0 serves on the socket
    inherited from its agent."""
    store = open_store(order.store, plan.world_size, timedelta(seconds=STORE_TIMEOUT_S))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=order.rank, world_size=plan.world_size, timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())


def _optimizer(run: Run, pipeline: Pipeline, plan: Plan) -> torch.optim.Optimizer:
    """Return AdamW over this rank's parameters, with weight decay on matrices only."""
    settings = run.optimizer
    parameters = [parameter for _, parameter in pipeline.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # `fused` refuses a mix of DTensors and plain tensors, or of meshes, which a stage with tensor parallelism has. On a
    # CPU it takes a third of the time. On a GPU it can leave out a step without a finite gradient, and the host does
    # not wait.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=plan.tp == 1,
    )  # fmt: skip


def _set_progress(
    restored: RestoredState,
    named: list[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
) -> None:
    """Set the optimizer's count of steps and the loss scale to those of a restored state."""
    skipped = 0
    if restored.loss_scale is not None:
        skipped = restored.loss_scale.skipped
        if scaler is not None:
            scaler.state = restored.loss_scale
    set_optimizer_step(named, optimizer, restored.step - skipped)


def manifest_of(trainer: Trainer) -> Manifest:
    """Return the manifest of a checkpoint of the trainer's state, with an empty list of files."""
    run = trainer.run
    return Manifest(
        step=trainer.step,
        generation=trainer.generation,
        samples=trainer.step * trainer.plan.sequences,
        seed=run.seed,
        run_sha256=run.sha256(),
        model_sha256=run.spec().sha256(),
        world_size=trainer.plan.world_size,
        loss_scale=trainer.scaler.state if trainer.scaler is not None else trainer.past_scale,
        reduction_sha256=trainer.plan.reduction_sha256 if trainer.plan.codec.has_state else None,
        files=[],
    )
