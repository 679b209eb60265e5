"""A person's own model: found, taken apart, measured, and every mistake in it told in a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hpctrain.base.errors import InputError
from hpctrain.model.build import build_part
from hpctrain.model.imported.describe import DescribeRequest, describe
from hpctrain.model.imported.model import blocks_of
from hpctrain.model.layers import StageBlocks
from hpctrain.records.model.imported_spec import ImportedSpec

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "own_model" / "code"
ARGUMENTS = {"layers": 3, "dim": 16, "heads": 4}
PLAIN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
    def forward(self, x):
        return x + self.linear(x)

class Net(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, vocabulary)
"""


WHOLE = """
class Whole(Net):
    def whole(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)
"""


def giving(output: str, arguments: str = "tokens") -> str:
    """A model whose own forward pass gives this, where `y` are the logits of its pieces."""
    body = f"        y = self.whole(tokens)\n        return {output}\n"
    return f"{WHOLE}    def forward(self, {arguments}):\n{body}make = Whole"


def edited(*lines: str) -> str:
    """A factory that changes a Net after it was made."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"def make(vocabulary):\n    net = Net(vocabulary)\n{body}    return net\n"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ImportedSpec]]:
    """describe() of a factory `make` whose code is PLAIN with more lines."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def run(lines: str, factory: str = "make", **given: object) -> ImportedSpec:
        names.append(f"written_{tmp_path.name}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(PLAIN + lines)
        values = {"args": {}, "front": None, "blocks": None, "back": None, "tensor_parallel": {}, **given}
        return describe(DescribeRequest(factory=f"{names[-1]}:{factory}", tokens=11, seq_len=6, seed=1, **values))  # type: ignore[arg-type]

    yield run
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ImportedSpec:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    plan = {"attention.wq": "columns", "attention.wk": "columns", "attention.wv": "columns", "attention.wo": "rows"}
    return describe(DescribeRequest("gpt:make", ARGUMENTS, None, None, None, plan, 11, 6, 1))  # type: ignore[arg-type]


def test_parts_have_the_weights_and_names_of_the_whole_model(example: ImportedSpec) -> None:
    import gpt

    torch.manual_seed(5)
    whole = gpt.make(vocabulary=11, seq_len=6, **ARGUMENTS)
    cuts = [(0, 0), (0, 2), (2, 3)]
    parts = [
        build_part(example, StageBlocks(start, stop, index == 0, index == 2), seed=5)
        for index, (start, stop) in enumerate(cuts)
    ]
    expected = dict(whole.named_parameters())
    found = {name: weight for part in parts for name, weight in part.named_parameters()}
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert [list(blocks_of(part)) for part in parts] == [[], [0, 1], [2]]
    x = tokens = torch.arange(6)[None]
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens))


def test_a_part_speaks_fp32_inside_and_the_type_of_products_at_the_end(example: ImportedSpec) -> None:
    first = build_part(example, StageBlocks(0, 2, True, False), seed=5)
    last = build_part(example, StageBlocks(2, 3, False, True), seed=5)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = first(torch.arange(6)[None])
        logits = last(hidden)
    assert (hidden.dtype, logits.dtype) == (torch.float32, torch.bfloat16)


def test_sizes_are_those_of_the_model(example: ImportedSpec) -> None:
    block = 2 * 2 * 16 + 4 * (16 * 16 + 16) + 2 * 4 * 16 * 16 + 5 * 16
    assert example.block_parameters() == block
    assert example.split_parameters == 4 * 16 * 16 + 3 * 16
    assert example.block_parameters(2) == block - example.split_parameters // 2
    assert example.parameters() == 3 * block + 11 * 16 + 6 * 16 + 2 * 16 + 16 * 11
    # 2 FLOPs a weight and token, and 4·seq·dim for the two products of attention.
    assert example.block_sizes.flops == 6 * (2 * 12 * 16 * 16 + 4 * 6 * 16)
    assert example.back_sizes.flops == 6 * 2 * 16 * 11
    assert example.forward_flops(2, 6, 3) == 2 * example.back_sizes.flops
    # At least the input of each linear, once: 5 of width dim (q, k and v share theirs) and one of 4·dim.
    assert example.block_sizes.activation_bytes > 6 * 4 * (3 * 16 + 4 * 16)
    assert example.activation_bytes(1, 6, 2) < example.activation_bytes(1, 6)
    assert example.tensor_parallel_degrees == [2, 4]
    assert not example.tied


def test_defaults_follow_the_order_of_the_modules(ask: Callable[..., ImportedSpec]) -> None:
    spec = ask("""
class Outer(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Embedding(vocabulary, 8), "h": nn.ModuleList(Block() for _ in range(2)),
                                   "norm": nn.LayerNorm(8)})
        self.head = nn.Linear(8, 16)
make = Outer
""")
    assert (spec.front, spec.blocks, spec.back) == (["body.embed"], "body.h", ["body.norm", "head"])
    assert (spec.tokens, spec.vocabulary) == (11, 16)


def test_a_shared_weight_is_seen_and_its_model_kept_in_one_stage(ask: Callable[..., ImportedSpec]) -> None:
    spec = ask("""
def make(vocabulary):
    net = Net(vocabulary)
    net.head = nn.Linear(8, vocabulary, bias=False)
    net.head.weight = net.embed.weight
    return net
""")
    assert spec.tied
    assert spec.parameters() == 11 * 8 + 3 * (8 * 8 + 8)
    assert "share a weight" in (spec.pipeline_error(2) or "")
    assert spec.pipeline_error(1) is None
    with pytest.raises(InputError, match="share a weight"):
        build_part(spec, StageBlocks(0, 1, True, False), seed=1)


@pytest.mark.parametrize(
    ("lines", "given", "said"),
    [
        ("", {"factory": "absent"}, r"has no 'absent'; it has .*Block"),
        ("make = 3", {}, r"is of type int; allowed: a function or class"),
        ("def make(**known): raise RuntimeError('no luck')", {}, r"raised RuntimeError: no luck \(line .*: def make"),
        ("def make(): pass", {}, "gave NoneType; allowed: a torch.nn.Module"),
        ("make = Net", {"args": {"width": 3}}, r"raised TypeError: .*unexpected keyword argument 'width'"),
        ("make = Net", {"front": ["embeded"]}, r"model\.front: no module 'embeded'; the model has embed, layers, head"),
        ("make = Net", {"blocks": "layers.0"}, r"model\.blocks: layers\.0 is a Block of 1 modules; allowed"),
        ("make = Net", {"front": ["embed", "head"]}, r"layers\.0 cannot be applied to what .* shape \(2, 6, 11\)"),
        ("make = Net", {"back": ["layers.2"]}, r"share weights with one another, with front \(embed\) or with back"),
        ("make = Net", {"back": ["layers"]}, r"share weights with one another"),
        ("def make(vocabulary): return Block()", {}, r"give the container of the repeated blocks; found: none"),
        (
            edited("net.more = nn.ModuleList([Block(), Block()])"),
            {}, r"found: layers \(3\), more \(2\)",
        ),
        (
            edited("net.layers[1].linear = nn.Linear(8, 8, bias=False)"),
            {}, r"layers\.1 is not like layers\.0: they differ in linear\.bias \[8\]",
        ),
        (
            edited("net.layers[1] = net.layers[0]"),
            {}, "holds the same module more than once",
        ),
        (
            edited("net.layers[1].linear.weight = net.layers[0].linear.weight"),
            {}, "share weights with one another",
        ),
        (
            edited("net.bias = nn.Parameter(torch.ones(8))"),
            {}, r"the weight bias is in none of front \(embed\), layers and back \(head\)",
        ),
        (
            edited("net.head.weight.requires_grad_(False)"),
            {}, r"weight head\.weight: found requires_grad False",
        ),
        ("def make(vocabulary): return Net(vocabulary).half()", {}, r"found torch\.float16; all weights are fp32"),
        ("def make(vocabulary): return Net(7)", {}, r"model\.front: embed cannot be applied .*IndexError"),
        (
            edited("net.head = nn.Linear(8, 4)"),
            {}, r"shape \(2, 6, 4\); expected logits \[2, 6, 11 or more\]",
        ),
        (
            "class Scaled(Net):\n    def forward(self, tokens):\n        x = self.embed(tokens) * 3\n"
            "        for block in self.layers:\n            x = block(x)\n        return self.head(x)\nmake = Scaled",
            {}, "forward pass gives other logits than its pieces",
        ),
        (
            "class Pair(Block):\n    def forward(self, x):\n        return x, x\n"
            + edited("net.layers = nn.ModuleList([Pair(), Pair()])", "net.head = net._modules.pop('head')"),
            {"back": ["head"], "front": ["embed"]}, r"layers\.0 gave a tuple; allowed: one tensor",
        ),
        (
            "class Counting(Block):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('seen', torch.zeros(()))\n"
            "    def forward(self, x):\n        self.seen += 1\n        return super().forward(x)\n"
            + edited("net.layers = nn.ModuleList([Counting(), Counting()])"),
            {"back": ["head"], "front": ["embed"]}, r"changes the buffer layers\.0\.seen",
        ),
        (
            "class Fixed(Block):\n    def forward(self, x):\n        return super().forward(x.view(1, 6, 8))\n"
            + edited("net.layers = nn.ModuleList([Fixed(), Fixed()])"),
            {"back": ["head"], "front": ["embed"]}, r"layers\.0 cannot be applied .*\(2, 6, 8\): RuntimeError",
        ),
        (
            "class Aux(Block):\n    def forward(self, x):\n"
            "        y = super().forward(x)\n        return (y, y.mean()) if self.training else y\n"
            + edited("net.layers = nn.ModuleList([Aux(), Aux()])"),
            {"back": ["head"], "front": ["embed"]}, r"layers\.0 gave a tuple in training; allowed: one tensor",
        ),
        (
            edited("net.embed = nn.Sequential(net.embed, nn.BatchNorm1d(6))"),
            {"front": ["embed"], "back": ["head"]}, r"changes the buffer embed\.1\.running_mean",
        ),
        (
            giving("y, y.mean()"),
            {}, r"forward gives tuple \(Tensor \[2, 6, 11\], Tensor \[\]\) in training; expected a Tensor \[2, 6, 11\]",
        ),
        (giving("(y, y.mean()) if self.training else y"), {}, r"gives tuple \(.*\) in training; expected"),
        (giving("y.mean()"), {}, r"forward gives Tensor \[\] in training; expected a Tensor \[2, 6, 11\]"),
        (giving("{'logits': y, 'loss': y.mean()}"), {}, r"forward gives dict \(logits: .*, loss: Tensor \[\]\)"),
        (giving("{'hidden': y}"), {}, r"forward gives dict \(hidden: Tensor \[2, 6, 11\]\)"),
        (giving("None"), {}, r"forward gives None in training; expected"),
        (giving("y", "tokens, targets"), {}, r"tokens \[2, 6\] alone in training, raised TypeError: .*'targets'"),
        (giving("y.nonsense"), {}, r"raised AttributeError: .* \(line \d+ of /.*\.py: return y\.nonsense\)"),
        ("make = Net", {"tensor_parallel": {"w": "rows"}}, r"no linear 'w' in a block; it has linear"),
        (
            # Half of the columns of a linear that nothing puts together again.
            "make = Net", {"tensor_parallel": {"linear": "columns"}},
            "cannot be split like this: split in 2 it raises RuntimeError",
        ),
        (
            # Half of the inputs for a linear that is given all of them.
            "make = Net", {"tensor_parallel": {"linear": "rows"}}, "split in 2 it raises RuntimeError",
        ),
        (
            # A fused matrix: the first half of its columns is not half of each of its parts.
            "class Fused(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.both, self.out = nn.Linear(8, 16), nn.Linear(8, 8)\n"
            "    def forward(self, x):\n        a, b = self.both(x).chunk(2, -1)\n"
            "        return x + self.out(torch.tanh(a) * b)\n"
            + edited("net.layers = nn.ModuleList([Fused(), Fused()])"),
            {"back": ["head"], "front": ["embed"], "tensor_parallel": {"both": "columns", "out": "rows"}},
            r"it computes something else \(largest relative difference",
        ),
    ],
)  # fmt: skip
def test_every_mistake_is_a_line(
    ask: Callable[..., ImportedSpec], lines: str, given: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said) as raised:
        ask(lines, **given)
    assert "\n" not in str(raised.value)


def test_a_module_that_is_nowhere_is_told_with_where_it_was_looked_for() -> None:
    with pytest.raises(InputError, match=r"no module 'nowhere_at_all'; searched .*name the folder .* with `code`"):
        describe(DescribeRequest("nowhere_at_all.net:make", {}, None, None, None, {}, 11, 6, 1))


def test_a_module_that_fails_on_its_own_imports_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_another.py").write_text("import not_installed_here\n")
    with pytest.raises(InputError, match=r"importing needs_another raised ModuleNotFoundError: .*not_installed_here"):
        describe(DescribeRequest("needs_another:make", {}, None, None, None, {}, 11, 6, 1))


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ("y", "3 * y"),
        ("(y, None)", "(3 * y, None)"),
        ("{'logits': y, 'loss': None, 'past_key_values': [y]}", "{'logits': 3 * y}"),
        # The last position alone, as generation wants it.
        ("y if self.training else (y[:, -1:], None)", "y if self.training else (3 * y[:, -1:], None)"),
    ],
)
def test_a_forward_that_gives_logits_has_to_give_those_of_the_pieces(
    ask: Callable[..., ImportedSpec], same: str, other: str
) -> None:
    assert ask(giving(same)).layers == 3
    with pytest.raises(InputError, match="other logits than its pieces"):
        ask(giving(other))


def test_a_stage_refuses_what_is_no_tensor(ask: Callable[..., ImportedSpec]) -> None:
    """What a block gave when it was looked at is not what it gives in every step."""
    part = build_part(ask("make = Net"), StageBlocks(0, 3, True, True), seed=1)
    part.get_submodule("layers.1").register_forward_hook(lambda *_: {"x": 1})
    with pytest.raises(InputError, match=r"layers\.1 gave a dict; allowed: one tensor"):
        part(torch.zeros(1, 6, dtype=torch.long))


def test_a_padding_index_of_a_persons_embedding_keeps_its_meaning(ask: Callable[..., ImportedSpec]) -> None:
    """As in torch: that row takes no part in training."""
    spec = ask(edited("net.embed = nn.Embedding(vocabulary, 8, padding_idx=3)"), front=["embed"], back=["head"])
    part = build_part(spec, StageBlocks(0, 3, True, True), seed=1)
    weight = part.get_submodule("embed").weight
    assert not weight[3].any()
    part(torch.tensor([[3, 4, 3]])).sum().backward()
    assert not weight.grad[3].any()
    assert weight.grad[4].any()
