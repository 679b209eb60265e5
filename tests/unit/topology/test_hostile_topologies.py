"""Other tools' files of a topology, and the file of pairs beside our own, whatever is in them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hostile_files import as_json, check_reader, damaged, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import FileError
from hpctrain.cli.commands.topology import topology_command as command
from hpctrain.records.topology.pair_matrix import FIGURES, PairMatrix, read_pairs
from hpctrain.topology.formats.nccl import from_nccl
from hpctrain.topology.formats.slurm import from_slurm

MANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NCCL = b"""<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64">
    <pci busid="0000:17:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" vendor="0x10de" device="0x20b0" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="0000:19:00.0" count="12" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0000:19:00.0" vendor="0x10de" device="0x20b0" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1"/>
      </pci>
    </pci>
    <nic><net name="mlx5_0" dev="0" speed="200000" port="1"/></nic>
  </cpu>
</system>
"""  # fmt: skip
CONF = b"SwitchName=s0 Nodes=n[1-4]\nSwitchName=s1 Nodes=n[5-8] LinkSpeed=1\nSwitchName=top Switches=s[0-1]\n"
YAML = [
    {"topology": "a", "cluster_default": True,
     "tree": {"switches": [{"switch": "s0", "nodes": "n[1-4]"}, {"switch": "t", "children": "s0"}]}},
]  # fmt: skip


def _nccl(path: Path) -> object:
    return from_nccl(path.read_bytes().decode("utf-8", "replace"), str(path), ["n1"], 0.0)


def _slurm(path: Path) -> object:
    return from_slurm(path.read_bytes().decode("utf-8", "replace"), str(path), 0.0)


@pytest.mark.parametrize(("name", "valid", "read"), [("t.xml", NCCL, _nccl), ("topology.conf", CONF, _slurm)])
def test_any_file_of_another_tool_is_imported_or_refused(
    name: str, valid: bytes, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(valid)
    assert read(path) is not None
    odd = st.sampled_from(
        [b"9" * 5000, b"-1", b"0x", b"\xc2\xb2", b"n[0-99999999]", b"[", b"@all", b"=", b"&x;", b"<!DOCTYPE a>", b"1e9",
         b"<gpu/>", b"<pci>", b" Switches=s0", b"top", b"\\\n", b"\x1b[2J", b"<a>" * 80, b"[0-999]x[0-999]"]
    )  # fmt: skip

    @st.composite
    def replaced(draw: st.DrawFn) -> bytes:
        data = valid
        for _ in range(draw(st.integers(1, 3))):
            words = data.replace(b'"', b" ").replace(b"=", b" ").split()
            word = draw(st.sampled_from(words))
            data = data.replace(word, draw(odd), draw(st.sampled_from([1, -1])))
            if not data.strip():
                break
        return data

    @MANY
    @given(replaced() | damaged(valid) | st.binary(max_size=40))
    def fuzz(data: bytes) -> None:
        path.write_bytes(data)
        check_reader(read, path)

    fuzz()


@MANY
@given(mutated(YAML))
def test_any_topology_yaml_is_imported_or_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "topology.yaml"
    path.write_bytes(as_json(value))
    check_reader(_slurm, path)


def test_an_import_of_a_fifo_or_of_nodes_beyond_number_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.conf")
    (tmp_path / "u.conf").write_text("SwitchName=s0 Nodes=n[0-99999999]\n")
    for name, words in (("t.conf", "is a FIFO"), ("u.conf", "has more than 100000 names")):
        done = CliRunner().invoke(command, ["import", str(tmp_path / name)])
        assert isinstance(done.exception, FileError)
        assert words in str(done.exception)


NODES = ["n1", "n2", "n3"]


def _pairs(path: Path) -> PairMatrix:
    data = path.read_bytes()
    return read_pairs(path, hashlib.sha256(data).hexdigest(), NODES, path.with_name("topology.json"))


def _npz(kind: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    """The file of pairs with some of its arrays replaced."""
    matrix = PairMatrix(NODES)
    sink = io.BytesIO()
    arrays: dict[str, bytes] = {}
    for name, array in {"nodes": np.array(NODES, dtype=np.str_), **matrix.figures}.items():
        one = io.BytesIO()
        np.save(one, array)
        arrays[name] = one.getvalue()
    with zipfile.ZipFile(sink, "w", kind) as made:
        for name, data in (arrays | changed).items():
            made.writestr(f"{name}.npy", data)
    return sink.getvalue()


def _npy(shape: str, descr: str = "<f4", data: bytes = b"") -> bytes:
    """An array whose header claims a shape, whatever its data."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        _npz(bytes_per_s=_npy("(1000000, 1000000)")),
        _npz(bytes_per_s=_npy("(3, 3)", "|O", b"x" * 72)),
        _npz(bytes_per_s=_npy("(3, 3)", "<f8", bytes(72))),
        _npz(bytes_per_s=_npy("(-1, 3)")),
        _npz(bytes_per_s=_npy("(" * 300)),
        _npz(nodes=_npy("(3,)", "<U1000000000")),
        _npz(nodes=_npy("(99999999999,)", "<U2")),
        _npz(zipfile.ZIP_DEFLATED),
        _npz(alpha_s=b""),
        b"PK\x05\x06" + bytes(18),
    ],
)
def test_a_file_of_pairs_that_claims_too_much_is_refused_unloaded(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "pairs-000000000000.npz"
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"topology\.json: fabric\.matrix\.file: .*is not a file of pairs"):
        _pairs(path)


def test_a_file_of_pairs_larger_than_its_nodes_need_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "pairs-000000000000.npz"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileError, match=r"topology\.json: fabric\.matrix\.file: .*expected at most"):
        read_pairs(path, "0" * 64, NODES, tmp_path / "topology.json")


@MANY
@given(damaged(_npz()) | st.binary(max_size=60))
def test_any_file_of_pairs_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pairs.npz"
    path.write_bytes(data)
    check_reader(_pairs, path)


def test_the_file_of_pairs_itself_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pairs.npz"
    path.write_bytes(_npz())
    assert sorted(_pairs(path).figures) == sorted(FIGURES)
    assert json.dumps(_pairs(path).nodes) == json.dumps(NODES)
