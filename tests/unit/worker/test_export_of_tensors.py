"""An export has the same bytes however its checkpoint is cut, and its largest tensor decides what memory it takes."""

from __future__ import annotations

import hashlib
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hpctrain.base.errors import HpctrainError
from hpctrain.checkpoint.published import describe_file
from hpctrain.corpus.prepare.prepare import prepare
from hpctrain.hf.output import ExportFormat
from hpctrain.model.build import build_stage
from hpctrain.records.history.manifest import Manifest
from hpctrain.records.run.run import run_of
from hpctrain.worker.verbs.export import ExportRequest, export
from hpctrain.worker.weights import SavedWeights, weights_of


class _Cut(DefaultSavePlanner):
    """Saves each tensor as several parts along its first axis, as ranks with shards do."""

    def __init__(self, cuts: list[int]) -> None:
        super().__init__(flatten_state_dict=False)
        self._cuts = cuts

    def create_local_plan(self) -> SavePlan:
        items = []
        for place, (name, tensor) in enumerate(sorted(self.state_dict.items())):
            count = min(self._cuts[place % len(self._cuts)], len(tensor))
            ends = [len(tensor) * number // count for number in range(count + 1)]
            for start, end in pairwise(ends):
                offsets = torch.Size([start, *[0] * (tensor.dim() - 1)])
                chunk = ChunkStorageMetadata(offsets, torch.Size([end - start, *tensor.shape[1:]]))
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return self.state_dict[write_item.index.fqn].narrow(0, chunk.offsets[0], chunk.sizes[0]).clone()


def _save(folder: Path, tensors: dict[str, Tensor], cuts: list[int], files: bool) -> Path:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=files, sync_files=False)
    dcp.save(tensors, storage_writer=writer, planner=_Cut(cuts), no_dist=True)
    Manifest(
        step=1, generation=0, samples=1, seed=0, run_sha256="", model_sha256="", world_size=1,
        files=[describe_file(path) for path in sorted(folder.iterdir())],
    ).write(folder / "manifest.json")  # fmt: skip
    return folder


def _state(folder: Path, seed: int) -> dict[str, Tensor]:
    spec = run_of(folder).spec()
    named = build_stage(spec, 0, spec.layers, seed).named_parameters()
    weights = {name: parameter.detach() for name, parameter in named}
    moments = {f"exp_avg.{name}": torch.ones_like(tensor) for name, tensor in weights.items()}
    return {f"model.{name}": tensor for name, tensor in weights.items()} | moments


def _export(folder: Path, checkpoint: Path | None, output: Path, dtype: str, file_format: ExportFormat) -> list[str]:
    output.mkdir(exist_ok=True)
    return export(
        ExportRequest(str(folder), checkpoint and str(checkpoint), str(output), dtype, 8000, file_format=file_format)
    )


def _hashes(folder: Path, checkpoint: Path | None, dtype: str = "bfloat16") -> dict[str, str]:
    names = _export(folder, checkpoint, folder / "out", dtype, "hf")
    return {name: hashlib.sha256((folder / "out" / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with data and without checkpoints."""
    path = tmp_path_factory.mktemp("cuts") / "run"
    (path.parent / "a.txt").write_text("some words " * 50)
    prepare([path.parent / "a.txt"], path.parent / "data")
    path.mkdir(mode=0o700)
    dims = {"family": "gpt2", "layers": 4, "dim": 16, "heads": 2, "vocab": 257, "positions": 32}
    run = {
        "steps": 10, "seed": 5, "model": {"dims": dims}, "data": {"train": [str(path.parent / "data")], "seq_len": 32},
        "batch": {"global": 2},
    }  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(run))
    return path


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_the_bytes_do_not_depend_on_how_the_checkpoint_is_cut(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, cuts: list[int], files: bool
) -> None:
    state = _state(folder, 1)
    whole = _hashes(folder, _save(tmp_path_factory.mktemp("whole"), state, [1], True))
    assert len(whole) > 2
    assert _hashes(folder, _save(tmp_path_factory.mktemp("cut"), state, cuts, files)) == whole


@pytest.mark.parametrize("file_format", get_args(ExportFormat))
def test_one_tensor_of_the_export_is_held_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: ExportFormat
) -> None:
    held, most, read = [0], [0], SavedWeights.read

    def counted(weights: SavedWeights, name: str) -> Tensor:
        tensor = read(weights, name)
        held[0] += tensor.nbytes
        most[0] = max(most[0], held[0])
        weakref.finalize(tensor, lambda size: held.__setitem__(0, held[0] - size), tensor.nbytes)
        return tensor

    monkeypatch.setattr(SavedWeights, "read", counted)
    state = _state(folder, 1)
    _export(folder, _save(tmp_path / "saved", state, [2], True), tmp_path / "out", "bfloat16", file_format)
    largest = max(tensor.nbytes for tensor in state.values())
    # The tensor before may live until the next one is there.
    assert largest <= most[0] <= 2 * largest < sum(tensor.nbytes for tensor in state.values()) / 3


def test_step_0_is_the_model_before_training(folder: Path, tmp_path: Path) -> None:
    state = _state(folder, 5)
    assert _hashes(folder, None) == _hashes(folder, _save(tmp_path / "saved", state, [1], True))
    weights = weights_of(run_of(folder), None)
    assert {f"model.{name}": shape for name, shape in weights.shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith("model.")
    }
    exported = load_file(folder / "out" / next(iter(_hashes(folder, None, "float32"))))
    assert torch.equal(exported["transformer.wte.weight"], state["model.embedding.weight"])


def test_a_dcp_folder_has_the_names_and_the_bits_of_the_safetensors_files(folder: Path, tmp_path: Path) -> None:
    saved = _save(tmp_path / "saved", _state(folder, 1), [3], True)
    files = _export(folder, saved, tmp_path / "hf", "bfloat16", "hf")
    expected = {name: tensor for file in files for name, tensor in load_file(tmp_path / "hf" / file).items()}
    names = _export(folder, saved, tmp_path / "dcp", "bfloat16", "dcp")
    assert sorted(names) == sorted([".metadata", *(f"__0_{number}.distcp" for number in range(len(expected)))])
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert metadata.keys() == expected.keys()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("file_format", get_args(ExportFormat))
def test_a_weight_without_a_value_is_named(folder: Path, tmp_path: Path, file_format: ExportFormat) -> None:
    state = _state(folder, 1)
    state["model.layers.1.feed_forward.w1.weight"][3, 4] = float("nan")
    with pytest.raises(HpctrainError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight: has numbers .* in bfloat16"):
        _export(folder, _save(tmp_path / "saved", state, [1], True), tmp_path / "out", "bfloat16", file_format)
