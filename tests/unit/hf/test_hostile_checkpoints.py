"""Checkpoints that somebody else made: pickles that would run code, damaged archives, and tables that lie."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import check_reader, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.hf.convert.dcp_folder import METADATA, tensors_of_dcp
from hpctrain.hf.convert.megatron_ranks import tensors_of_ranks
from hpctrain.hf.convert.pickle_data import PickleDataError, PickledName, PickledObject, pickle_data
from hpctrain.hf.convert.torch_file import TorchFile

MANY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoints"
STACKED = GOLDEN / "megatron-llama" / "iter_0000007"
RANKS = GOLDEN / "megatron-llama" / "iter_0000008"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(-(2**60), 2**60), inner)
    ),
    max_leaves=20,
)


class Bomb:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@given(PLAIN, st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_they_were_pickled(value: Any, protocol: int) -> None:
    assert pickle_data(pickle.dumps(value, protocol)) == value


def test_objects_become_records_of_what_the_pickle_says() -> None:
    value = pickle_data(pickle.dumps({"size": torch.Size([2, 3]), "dtype": torch.float32, "table": OrderedDict(a=1)}))
    assert value["size"].name == "torch.Size"
    assert value["size"].arguments == ((2, 3),)
    assert value["dtype"] == PickledName("torch.float32")
    assert value["table"] == {"a": 1}


@given(st.binary(max_size=80) | damaged(pickle.dumps({"a": [1, (2, torch.Size([3]))], "b": OrderedDict(c="d")})))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(PickleDataError):
        pickle_data(data)


def test_a_pickle_that_would_take_all_memory_or_time_is_refused() -> None:
    doubling = b"\x80\x04)" + b"2\x86" * 2000  # dup is no instruction of a pickler
    with pytest.raises(PickleDataError, match="DUP"):
        pickle_data(doubling + b".")
    memoized = b"\x80\x04}K\x01\x85" + b"".join(b"\x94h%c\x86" % number for number in range(60)) + b"K\x01s."
    with pytest.raises(PickleDataError, match="a key that is no short text"):
        pickle_data(memoized)
    assert pickle_data(b"\x80\x04Nr\xff\xff\xff\xff.") is None  # a slot of the memo far beyond all others


def long_text(size: int) -> bytes:
    return b"X" + size.to_bytes(4, "little") + b"a" * size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"}(" + b"N" * 9 + b"tNs.", "a key that is no short"),  # hashed anew for each entry
        (b"}" + b"\x8a\x08" + (2**61 - 1).to_bytes(8, "little") + b"Ns.", "a key that is no short"),  # hash 0
        (b"}" + b"\x8a\xfe" + b"\1" * 254 + b"Ns.", "a key that is no short"),
        (b"}" + long_text(2**16 + 1) + b"Ns.", "a key that is no short"),
        (long_text(10**4) + b"\x94h\0\x93.", "a name of more than 1000 characters"),  # copied for each object
        (b"(" + b"}" * 101 + b"t.", "more than 100 containers"),
        (b"N" + b"\x94" * 101 + b".", "more than 100 containers"),
        (b"(" + b"cos\nsep\n)R" * 51 + b"t.", "more than 100 containers"),
    ],
)
def test_each_byte_of_a_pickle_takes_a_short_time_and_little_memory(
    value: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.hf.convert.pickle_data._CONTAINERS", 100)
    with pytest.raises(PickleDataError, match=words):
        pickle_data(b"\x80\x04" + value)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "ran")
    pickle.loads(pickle.dumps(bomb))  # it works where somebody unpickles it
    (tmp_path / "ran").rmdir()
    (tmp_path / METADATA).write_bytes(pickle.dumps(bomb))
    with pytest.raises(FileError, match=r"is not what torch writes as \.metadata"):
        tensors_of_dcp(tmp_path)
    torch.save({"args": bomb, "model": {"a": bomb}}, tmp_path / "common.pt")
    assert isinstance(TorchFile(tmp_path / "common.pt").value()["args"], PickledObject)
    (tmp_path / "mp_rank_00").mkdir()
    shutil.copy(tmp_path / "common.pt", tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    assert tensors_of_ranks(tmp_path) == ({}, {})
    assert not (tmp_path / "ran").exists()


def read_stacked(path: Path) -> object:
    """Every tensor of the golden checkpoint with the file at `path` in the place of its own."""
    return [tensor.read() for tensor in tensors_of_dcp(path.parent).values()]


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp"])
def test_any_damaged_file_of_a_dcp_folder_is_read_or_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(STACKED, folder)

    @MANY
    @given(damaged((STACKED / name).read_bytes()))
    def check(data: bytes) -> None:
        (folder / name).write_bytes(data)
        check_reader(read_stacked, folder / name)

    check()


def test_any_damaged_file_of_a_rank_is_read_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(RANKS, folder)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"

    def read(_: Path) -> object:
        return [tensor.read() for tensor in tensors_of_ranks(folder)[0].values()]

    @MANY
    @given(damaged((RANKS / "mp_rank_00" / "model_optim_rng.pt").read_bytes()))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        check_reader(read, path)

    check()


def metadata(**changes: Any) -> bytes:
    """A DCP folder's metadata of one tensor [4] in `__0_0.distcp`, with pieces replaced."""
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    shape, part = changes.get("shape", [4]), changes.get("part", [4])
    chunk = m.ChunkStorageMetadata(torch.Size([0] * len(part)), torch.Size(part))
    tensor = m.TensorStorageMetadata(m.TensorProperties(torch.float32), torch.Size(shape), [chunk])
    place = _StorageInfo(changes.get("file", "__0_0.distcp"), changes.get("offset", 0), changes.get("length", 10**6))
    index = m.MetadataIndex("a", torch.Size([0] * len(part)))
    return pickle.dumps(m.Metadata({"a": tensor}, None, {index: place}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file": "../../etc/passwd"}, "a file's plain name is expected"),
        ({"file": "/etc/passwd"}, "a file's plain name is expected"),
        ({"file": "missing.distcp"}, "missing.distcp: no such file"),
        ({"offset": 10**9}, "and a tensor is said to be at 1000000000 to"),
        ({"offset": -1}, "and a tensor is said to be at -1 to"),
        ({"shape": [8]}, "its parts are not the whole of shape [8]"),
        ({"shape": [2**40], "part": [2**40], "length": 2**43}, "and a tensor is said to be at 0 to"),
        ({"shape": [2**40], "part": [2**40]}, "is not what torch writes there"),
        ({"shape": [3], "part": [3]}, "found F32 [4]; .metadata says F32 [3]"),
    ],
)
def test_a_table_that_lies_is_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "__0_0.distcp")
    size = (tmp_path / "__0_0.distcp").stat().st_size
    (tmp_path / METADATA).write_bytes(metadata(**{"length": size, **changes}))
    with pytest.raises(FileError) as error:
        tensors_of_dcp(tmp_path)["a"].read()
    (line,) = str(error.value).splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((0, 0), (2, 2)), ((0, 2), (4, 2)), ((2, 0), (2, 2))], None),
        ([((0, 0), (4, 0)), ((0, 0), (4, 4))], None),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "its parts are not the whole of shape [4, 4]"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "its parts are not the whole of shape [4, 4]"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "its parts are not the whole of shape [4, 4]"),
        ([((0, 0), (3, 3)), ((2, 2), (1, 2)), ((0, 3), (1, 4 - 3)), ((3, 0), (1, 4))], "its parts are not the whole"),
        ([((0, 0), (2, 4)), ((2, 0), (2, 4)), None], "its part at [9, 9] is stored in no file"),
    ],
)
def test_parts_hold_each_number_once(parts: list[Any], words: str | None, tmp_path: Path) -> None:
    """Memory in which nothing was written would become weights."""
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    whole = torch.arange(16.0).reshape(4, 4)
    chunks, places = [], {}
    for number, part in enumerate(parts):
        (row, column), (rows, columns) = part or ((9, 9), (1, 1))
        chunks.append(m.ChunkStorageMetadata(torch.Size([row, column]), torch.Size([rows, columns])))
        if part is None or columns == 0:
            continue
        file = tmp_path / f"{number}.distcp"
        torch.save(whole[row : row + rows, column : column + columns].clone(), file)
        index = m.MetadataIndex("a", torch.Size([row, column]))
        places[index] = _StorageInfo(file.name, 0, file.stat().st_size)
    tensor = m.TensorStorageMetadata(m.TensorProperties(torch.float32), torch.Size([4, 4]), chunks)
    (tmp_path / METADATA).write_bytes(pickle.dumps(m.Metadata({"a": tensor}, None, places)))
    if words is None:
        assert tensors_of_dcp(tmp_path)["a"].read().view("f4").tolist() == whole.tolist()
        return
    with pytest.raises(FileError) as error:
        tensors_of_dcp(tmp_path)
    assert words in str(error.value)


def test_a_link_or_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "__0_0.distcp")
    (tmp_path / METADATA).write_bytes(metadata(length=100))
    with pytest.raises(FileError, match="FIFO"):
        tensors_of_dcp(tmp_path)["a"].read()


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """A few bytes could become any number of bytes."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(10**6))
    with pytest.raises(FileError, match="is compressed"):
        TorchFile(path)


@pytest.mark.parametrize("change", ["expanded", "sparse", "integer", "nested"])
def test_only_dense_tensors_with_all_their_numbers_are_read(change: str, tmp_path: Path) -> None:
    tensor = {
        "expanded": torch.ones(1).expand(2**40),
        "sparse": torch.ones(2, 2).to_sparse(),
        "integer": torch.ones(4, dtype=torch.int64),
        "nested": torch.nn.Parameter(torch.ones(4)),
    }[change]
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    path = tmp_path / "a.pt"
    path.write_bytes(buffer.getvalue())
    file = TorchFile(path)
    if change == "nested":
        assert file.tensor(file.value(), "a").read().tolist() == [0x3F800000] * 4
        return
    with pytest.raises(FileError, match=r"dense tensor|is said to have shape"):
        file.tensor(file.value(), "a")
