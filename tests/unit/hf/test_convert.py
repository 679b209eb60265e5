"""Checkpoints that torchtitan, Megatron-Core and torch wrote themselves (tools/foreign_checkpoints), as Hugging Face
folders."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file

from hpctrain.base.errors import FileError
from hpctrain.cli.main import cli
from hpctrain.hf.convert.convert import convert
from hpctrain.hf.convert.dcp_folder import tensors_of_dcp
from hpctrain.hf.folder import read_folder

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoints"
ROPE_SCALING = (
    'rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, '
    '"original_max_position_embeddings": 8192}'
)
TITAN = ("num_attention_heads=4", "rope_theta=500000", "rms_norm_eps=1e-5", "max_position_embeddings=128")
SETTINGS = {"torchtitan": (*TITAN, ROPE_SCALING), "torchtitan-tied": (*TITAN, "rope_scaling=null")}
CASES = {
    "torchtitan/step-10": "LlamaForCausalLM",
    "torchtitan-tied/step-10": "LlamaForCausalLM",
    "megatron-llama/iter_0000007": "LlamaForCausalLM",
    "megatron-llama/iter_0000008": "LlamaForCausalLM",
    "megatron-llama-stages/iter_0000007": "LlamaForCausalLM",
    "megatron-llama-stages/iter_0000008": "LlamaForCausalLM",
    "megatron-qwen2/iter_0000007": "Qwen2ForCausalLM",
    "megatron-qwen3/iter_0000007": "Qwen3ForCausalLM",
    "megatron-gpt2/iter_0000007": "GPT2LMHeadModel",
}
"""Golden checkpoint -> class of the model: two ranks of tensor or pipeline parallelism, the newer and the older format
of Megatron, tied and not."""


def settings_of(case: str) -> tuple[str, ...]:
    return SETTINGS.get(case.partition("/")[0], ())


def run(*words: object) -> tuple[int, str]:
    """Exit code and error of `hpctrain convert`; an error of hpctrain is the text that it would print."""
    result = CliRunner().invoke(cli, ["convert", *map(str, words)], prog_name="hpctrain")
    error = result.exception
    return getattr(error, "exit_code", result.exit_code), str(error) if hasattr(error, "exit_code") else result.output


def copied(case: str, folder: Path) -> Path:
    made = folder / "copy"
    shutil.copytree(GOLDEN / case, made)
    return made


def save_common(folder: Path, **changes: Any) -> None:
    """Replace Megatron-LM's arguments in a checkpoint, beside other values as training leaves them there."""
    args = argparse.Namespace(num_attention_heads=4, norm_epsilon=1e-5, rotary_base=10_000, use_rope_scaling=False)
    args.max_position_embeddings = 16
    for name, value in changes.items():
        setattr(args, name, value)
    torch.save(
        {"args": args, "rng": np.random.default_rng(0), "kind": {torch.float32: Path("a")}}, folder / "common.pt"
    )


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_the_tool_that_wrote_the_checkpoint(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = convert(GOLDEN / case, tmp_path / "hf", None, settings_of(case), 10**9, force=False)
    assert done.architecture == CASES[case]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    golden = np.load((GOLDEN / case).parent / "logits.npz")
    with torch.no_grad():
        logits = model(torch.from_numpy(golden["tokens"])).logits
    assert abs(golden["logits"]).max() > 1
    assert abs(logits.numpy() - golden["logits"]).max() < TOLERANCE
    assert read_folder(tmp_path / "hf").dims.layers == 2


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("7") or "step" in case])
def test_parts_are_read_as_torch_reads_them(case: str) -> None:
    tensors = tensors_of_dcp(GOLDEN / case)
    expected = {name: torch.empty(tensor.shape) for name, tensor in tensors.items()}
    dcp.load(expected, checkpoint_id=GOLDEN / case, no_dist=True)
    for name, tensor in tensors.items():
        bits = expected[name].numpy().view(np.uint32)
        assert np.array_equal(tensor.read(), bits), name
        assert np.array_equal(tensor.rows(1, 2), bits[1:2]), name


def test_files_have_the_given_size_and_numbers_keep_their_type(tmp_path: Path) -> None:
    """Names of transformers, after a prefix, beside the state of an optimizer; bfloat16, with a matrix that is saved
    with exchanged axes."""
    whole = load_llama(tmp_path)
    state = {f"model.{name}": tensor.bfloat16() for name, tensor in whole.items()}
    state["model.model.layers.0.mlp.up_proj.weight"] = (
        state["model.model.layers.0.mlp.up_proj.weight"].t().contiguous().t()
    )
    state["optimizer.state.exp_avg.model.embed_tokens.weight"] = torch.zeros(3)
    dcp.save({**state, "step": torch.tensor(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    config = tmp_path / "llama" / "config.json"
    for name in ("tokenizer.json", "chat_template.jinja"):
        (config.parent / name).write_text("{}")
    done = convert(tmp_path / "dcp", tmp_path / "hf", config, (), 1500, force=False)
    assert [name for name in done.files if name.startswith("model-0000")][1:]
    assert {"tokenizer.json", "chat_template.jinja"} <= set(done.files)
    read = {
        name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert read.keys() == whole.keys()
    for name, tensor in read.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, whole[name].bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def load_llama(folder: Path) -> dict[str, torch.Tensor]:
    case = "megatron-llama/iter_0000007"
    convert(GOLDEN / case, folder / "llama", None, (), 10**9, force=False)
    tensors: dict[str, torch.Tensor] = load_file(folder / "llama" / "model.safetensors")
    return tensors


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_no_file_of_another_kind_is_passed_over(name: str, tmp_path: Path) -> None:
    checkpoint = copied("megatron-llama/iter_0000007", tmp_path)
    load_llama(tmp_path)
    shutil.copy(tmp_path / "llama" / "config.json", checkpoint)
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    assert text == f"{checkpoint}/{name}: is a FIFO, expected a regular file; put the file itself there"
    assert not (tmp_path / "hf").exists()


def test_the_index_counts_the_bytes_of_mixed_types(tmp_path: Path) -> None:
    state = load_llama(tmp_path)
    state = {name: tensor.half() if "proj" in name else tensor for name, tensor in state.items()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "hf", tmp_path / "llama" / "config.json", (), 5000, force=False)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "hf" / file)[name], state[name])


def test_both_names_of_the_type_of_numbers_agree(tmp_path: Path) -> None:
    convert(GOLDEN / "megatron-llama/iter_0000007", tmp_path / "hf", None, ("dtype=float16",), 10**9, force=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config.get("dtype"), config["torch_dtype"]) == (None, "float32")


def test_rows_that_megatron_added_to_the_vocabulary_are_cut_off(tmp_path: Path) -> None:
    done = convert(
        GOLDEN / "megatron-llama/iter_0000007", tmp_path / "hf", None, ("vocab_size=30",), 10**9, force=False
    )
    assert done.architecture == "LlamaForCausalLM"
    whole, cut = load_llama(tmp_path), load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(cut[name], whole[name][:30])


def test_without_arguments_megatron_needs_the_keys_of_config_json(tmp_path: Path) -> None:
    checkpoint = copied("megatron-llama/iter_0000007", tmp_path)
    (checkpoint / "common.pt").unlink()
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    assert "does not say num_attention_heads, rms_norm_eps, rope_theta, rope_scaling, max_position_embeddings" in text
    assert len(text.splitlines()) == 1
    words = ["num_attention_heads=4", "rms_norm_eps=1e-5", "rope_theta=10000", "rope_scaling=null",
             "max_position_embeddings=16"]  # fmt: skip
    code, text = run(checkpoint, "-o", tmp_path / "hf", *(word for key in words for word in ("--set", key)), "--json")
    assert code == 0
    assert json.loads(text)["parameters"] == 4944
    save_common(checkpoint)
    assert run(checkpoint, "-o", tmp_path / "again")[0] == 0
    same = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("hf", "again")]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("case", "words", "expected"),
    [
        ("torchtitan-tied/step-10", (), "does not say num_attention_heads, rms_norm_eps, rope_theta, rope_scaling"),
        ("torchtitan-tied", (), "found no checkpoint; name one of the folders in it, such as step-10"),
        ("megatron-llama", (), "found no checkpoint; name one of the folders in it, such as iter_000000"),
        ("torchtitan-tied/step-10", ("hidden_size=32", *TITAN), "hidden_size: found 16; --set says 32"),
        ("megatron-llama/iter_0000007", ("vocab_size=64",), "vocab_size: found 32; --set says 64"),
        ("megatron-llama/iter_0000007", ("num_attention_heads=8",), "num_attention_heads: found 4; --set says 8"),
        ("torchtitan-tied/step-10", (*TITAN[1:], "num_attention_heads=3"), "no multiple of num_attention_heads 3"),
        ("torchtitan-tied/step-10", (*TITAN[1:], "num_attention_heads=many"), "found 'many'; a whole number"),
        ("megatron-llama/iter_0000007", ("hidden_act=relu",), "hidden_act"),
        ("megatron-llama/iter_0000007", ("foo=.nan",), "foo: no value of a config.json; finite numbers"),
        ("torchtitan-tied/step-10", (*TITAN, "rms_norm_eps=.inf"), "rms_norm_eps: no value of a config.json"),
        ("torchtitan-tied/step-10", (*TITAN, "rope_scaling=null", "max_position_embeddings=-5"), "found -5; a whole"),
        ("torchtitan-tied/step-10", ("vocab_size=3", *TITAN), "vocab_size: found 32; --set says 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(case: str, words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    options = [word for setting in words for word in ("--set", setting)]
    code, text = run(GOLDEN / case, "-o", tmp_path / "hf", *options)
    assert code == 2
    (line,) = text.splitlines()
    assert expected in line
    assert line.startswith(str(GOLDEN / case))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rotary_interleaved": True}, "args.rotary_interleaved: found True; allowed: False"),
        ({"num_experts": 8}, "args.num_experts: found 8; allowed: None"),
        ({"position_embedding_type": "none"}, "args.position_embedding_type: found 'none'; allowed: rope"),
        ({"norm_epsilon": float("nan")}, "rms_norm_eps: no value of a config.json; finite numbers"),
        ({"use_rope_scaling": True, "rope_scaling_factor": float("inf")}, "rope_scaling: no value of a config.json"),
        ({"max_position_embeddings": 10**5000}, "max_position_embeddings: found 'a value of another kind'; a whole"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings: found 1000000000000000; a whole number"),
        ({"window_size": (128, 0)}, "args.window_size: found 'a value of another kind'; allowed: None"),
        ({"no_rope_freq": [0, 1]}, "args.no_rope_freq: found 'a value of another kind'; allowed: None"),
        ({"ffn_hidden_size": 48}, "args.ffn_hidden_size: found 48; the tensors have 24"),
        ({"num_layers": 4}, "args.num_layers: found 4; the tensors have 2"),
        ({"kv_channels": 8}, "args.kv_channels: found 8; the tensors have 4"),
        ({"num_attention_heads": 5}, "its size 16 is no multiple of num_attention_heads 5"),
    ],
)
def test_megatron_models_without_a_counterpart_are_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    checkpoint = copied("megatron-llama/iter_0000007", tmp_path)
    save_common(checkpoint, **changes)
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    assert expected in text
    assert len(text.splitlines()) == 1


def test_the_file_of_a_missing_rank_is_named(tmp_path: Path) -> None:
    for case, lost in (("megatron-llama", "mp_rank_00"), ("megatron-llama-stages", "mp_rank_00_000")):
        checkpoint = copied(f"{case}/iter_0000008", tmp_path)
        shutil.rmtree(checkpoint / lost)
        code, text = run(checkpoint, "-o", tmp_path / "hf")
        assert (code, text) == (2, f"{checkpoint}: has no {lost}; copy the files of all ranks into it")
        shutil.rmtree(checkpoint)


def change_rank(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the file of a rank holds."""
    path = folder / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


NORM = "decoder.layers.0.input_layernorm.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda value: value["model"].update({QKV: value["model"][QKV].bfloat16()}), "found BF16 [16, 16]; mp_rank_00"),
        (lambda value: value["model"].update({QKV: value["model"][QKV].half()}), f"{QKV}: found F16 [16, 16]"),
        (lambda value: value["model"].update(extra=torch.ones(3)), "extra: found F32 [3]; mp_rank_00 has no such"),
        (lambda value: value["model"].pop(QKV), f"{QKV}: found no such tensor; mp_rank_00 has F32 [16, 16]"),
        (lambda value: value["model"][NORM].add_(1), f"{NORM}: has other numbers than in mp_rank_00"),
        (lambda value: value.update(iteration=8), "iteration: found 8; mp_rank_00 has 7"),
        (lambda value: setattr(value["args"], "rotary_base", 5), "args.rotary_base: found 5; mp_rank_00 has 10000"),
    ],
)
def test_ranks_of_two_checkpoints_are_not_joined(
    change: Callable[[dict[str, Any]], object], expected: str, tmp_path: Path
) -> None:
    checkpoint = copied("megatron-llama/iter_0000008", tmp_path)
    change_rank(checkpoint / "mp_rank_01", change)
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    (line,) = text.splitlines()
    assert line.startswith(f"{checkpoint}/mp_rank_01/model_optim_rng.pt: ")
    assert expected in line
    assert "copy the files of all ranks of one checkpoint" in line


def test_a_missing_last_rank_is_noticed(tmp_path: Path) -> None:
    checkpoint = copied("megatron-llama/iter_0000008", tmp_path)
    shutil.rmtree(checkpoint / "mp_rank_01")
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    assert "args.ffn_hidden_size: found 24; the tensors have 12" in text
    first = checkpoint / "mp_rank_00"
    change_rank(first, lambda value: setattr(value["args"], "tensor_model_parallel_size", 2))
    assert run(checkpoint, "-o", tmp_path / "hf") == (
        2, f"{checkpoint}: has no mp_rank_01; copy the files of all ranks into it"
    )  # fmt: skip
    shutil.copytree(first, checkpoint / "mp_rank_01")
    shutil.copytree(first, checkpoint / "mp_rank_02")
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    assert "args.tensor_model_parallel_size: found 2, and the folder has 3 ranks of it" in text
    for name, words in (
        ("mp_rank_00_000", "has mp_rank_00 and mp_rank_00_000 of the same rank"),
        ("mp_rank_00_000_001", "mp_rank_00_000_001 is no rank of tensor or pipeline parallelism; models with experts"),
    ):
        (checkpoint / name).mkdir()
        code, text = run(checkpoint, "-o", tmp_path / "hf")
        assert code == 2
        assert words in text
        (checkpoint / name).rmdir()


def test_tensors_without_floating_point_numbers_are_left_out(tmp_path: Path) -> None:
    """As Transformer Engine's state of 8-bit numbers, and counters of other layers."""
    checkpoint = copied("megatron-llama/iter_0000008", tmp_path)
    others = {"_extra_state": torch.zeros(3, dtype=torch.uint8), "amax": torch.empty(0), "steps": torch.tensor(3.0)}
    for rank in ("mp_rank_00", "mp_rank_01"):
        change_rank(checkpoint / rank, lambda value: value["model"].update(others))
    assert run(checkpoint, "-o", tmp_path / "hf")[0] == 0
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_llama(tmp_path).keys()


def test_interleaved_stages_are_named(tmp_path: Path) -> None:
    checkpoint = copied("megatron-llama/iter_0000008", tmp_path)
    change_rank(checkpoint / "mp_rank_00", lambda value: value.update(model0=value.pop("model"), model1={}))
    code, text = run(checkpoint, "-o", tmp_path / "hf")
    assert code == 2
    assert "interleaved stages model0, model1" in text


def test_a_missing_or_strange_tensor_is_named(tmp_path: Path) -> None:
    state = {name: torch.empty(tensor.shape) for name, tensor in tensors_of_dcp(GOLDEN / "torchtitan/step-10").items()}
    dcp.load(state, checkpoint_id=GOLDEN / "torchtitan/step-10", no_dist=True)
    settings = SETTINGS["torchtitan-tied"]
    dcp.save({**state, "layers.1.moe.router.weight": torch.ones(2)}, checkpoint_id=tmp_path / "more", no_dist=True)
    with pytest.raises(FileError, match=r"layers\.1\.moe\.router\.weight: no part of torchtitan's llama3 here"):
        convert(tmp_path / "more", tmp_path / "hf", None, settings, 10**9, force=False)
    del state["layers.1.ffn_norm.weight"]
    dcp.save(state, checkpoint_id=tmp_path / "less", no_dist=True)
    with pytest.raises(FileError, match=r"layers\.1\.ffn_norm\.weight: no such tensor"):
        convert(tmp_path / "less", tmp_path / "hf", None, settings, 10**9, force=False)
