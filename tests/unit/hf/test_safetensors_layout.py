"""Files that are written tensor by tensor are those of the safetensors library, and processes share all tensors."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from hpctrain.hf.safetensors_layout import DTYPES, lay_out, share_tensors
from hpctrain.hf.tensors import HfTensor, assign_to_shards

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
TENSORS = st.dictionaries(NAMES, SHAPES, min_size=1, max_size=8)


@given(TENSORS, st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3))
def test_a_file_is_that_of_the_library(shapes: dict[str, tuple[int, ...]], mixed: list[str]) -> None:
    kinds = dict(zip(shapes, itertools.cycle(mixed), strict=False))
    dtypes = {name: DTYPES[kind] for name, kind in kinds.items()}
    values = {name: torch.full(shape, float(number)).to(getattr(torch, kinds[name])) for number, (name, shape) in
              enumerate(shapes.items())}  # fmt: skip
    file = lay_out("a", [HfTensor(name, shape, (name,)) for name, shape in shapes.items()], dtypes)
    written = bytearray(file.size_bytes)
    written[: len(file.header)] = file.header
    for placed in file.tensors:
        data = values[placed.tensor.name].flatten().view(torch.uint8).numpy().tobytes()
        assert len(data) == placed.size_bytes
        written[placed.offset : placed.offset + placed.size_bytes] = data
    assert bytes(written) == save(values, metadata={"format": "pt"})


@given(TENSORS, st.integers(1, 6), st.integers(4, 200))
def test_processes_share_all_tensors_and_no_process_has_much_more(
    shapes: dict[str, tuple[int, ...]], processes: int, limit: int
) -> None:
    tensors = [HfTensor(name, shape, (name,)) for name, shape in shapes.items()]
    named = assign_to_shards(tensors, 4, limit)
    files = {name: lay_out(name, group, dict.fromkeys(shapes, "F32")) for name, group in named.items()}
    shares = share_tensors((placed for file in files.values() for placed in file.tensors), processes)
    assert len(shares) == processes
    written = [(placed.file, placed.tensor.name) for share in shares for placed in share]
    assert sorted(written) == sorted((name, tensor.name) for name, group in named.items() for tensor in group)
    sizes = [sum(placed.size_bytes for placed in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(tensor.count * 4 for tensor in tensors)
