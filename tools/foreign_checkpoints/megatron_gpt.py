# mypy: ignore-errors
"""Writes checkpoints of Megatron-Core's GPTModel and the logits of the models, on two processes of one CPU.

    pip install megatron-core==0.16.1
    python megatron_gpt.py tests/golden/checkpoints

Megatron-Core expects a GPU in a few places. These are replaced: waits for the device, and random numbers of dropout,
which is off. Megatron-LM's training loop is no part of the package; so this script saves what that loop saves: the
sharded state dict of the model with its arguments, and for the older format a file for each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import silu

WIDTH, HEADS, HIDDEN, VOCABULARY, TOKENS = 16, 4, 24, 32, 16
LLAMA = {"gated_linear_unit": True, "activation_func": silu, "add_bias_linear": False, "normalization": "RMSNorm",
         "num_query_groups": 2}  # fmt: skip
# name: settings of the model, tied, ranks of tensor parallelism, ranks of pipeline parallelism
CASES = {
    "megatron-llama": (LLAMA, False, 2, 1),
    "megatron-llama-stages": (LLAMA, True, 1, 2),
    "megatron-qwen2": ({**LLAMA, "add_qkv_bias": True}, True, 1, 1),
    "megatron-qwen3": ({**LLAMA, "qk_layernorm": True, "kv_channels": 8}, False, 2, 1),
    "megatron-gpt2": ({"normalization": "LayerNorm", "bias_activation_fusion": True}, True, 2, 1),
}


def arguments(settings: dict, tied: bool) -> argparse.Namespace:
    """Return Megatron-LM's arguments for the model, as its checkpoints hold them, with a few values that are no plain
    numbers or texts (a dtype, a list)."""
    llama = "gated_linear_unit" in settings
    return argparse.Namespace(
        num_layers=2, hidden_size=WIDTH, ffn_hidden_size=HIDDEN, num_attention_heads=HEADS,
        kv_channels=settings.get("kv_channels", WIDTH // HEADS), group_query_attention=llama,
        num_query_groups=settings.get("num_query_groups", 1), max_position_embeddings=TOKENS,
        position_embedding_type="rope" if llama else "learned_absolute", rotary_base=10_000, rotary_percent=1.0,
        rotary_interleaved=False, rotary_seq_len_interpolation_factor=None, use_rope_scaling=False,
        rope_scaling_factor=8.0, norm_epsilon=1e-5, apply_layernorm_1p=False, swiglu=llama, num_experts=None,
        apply_residual_connection_post_layernorm=False, multi_latent_attention=False, squared_relu=False,
        hidden_dropout=0.0, attention_dropout=0.0, bias_gelu_fusion=True, openai_gelu=False,
        untie_embeddings_and_output_weights=not tied, params_dtype=torch.float32, data_path=["a", "b"],
    )  # fmt: skip


def rank_main(rank: int, folder: str, name: str) -> None:
    os.chdir(folder)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self
    settings, tied, tensor, pipeline = CASES[name]
    world = tensor * pipeline
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    config = TransformerConfig(
        **{"bias_activation_fusion": False, **settings}, num_layers=2, hidden_size=WIDTH, num_attention_heads=HEADS,
        ffn_hidden_size=HIDDEN, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, pipeline_dtype=torch.float32,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            normalization=settings["normalization"], qk_layernorm=settings.get("qk_layernorm", False)
        ),
        vocab_size=VOCABULARY, max_sequence_length=TOKENS, pre_process=stage == 0, post_process=stage == pipeline - 1,
        position_embedding_type="rope" if "gated_linear_unit" in settings else "learned_absolute", rotary_base=10_000,
        share_embeddings_and_output_weights=tied, parallel_output=False,
    )  # fmt: skip
    model.eval()
    torch.manual_seed(1 + stage)
    for parameter in model.parameters():
        whole = [dim * (tensor if index == getattr(parameter, "partition_dim", -1) and parameter.tensor_model_parallel
                        else 1) for index, dim in enumerate(parameter.shape)] if hasattr(
                            parameter, "tensor_model_parallel") else list(parameter.shape)  # fmt: skip
        numbers = torch.randn(whole) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0)
        for axis, (part, size) in enumerate(zip(parameter.shape, whole, strict=True)):
            if part != size:
                numbers = numbers.narrow(axis, part * parallel_state.get_tensor_model_parallel_rank(), part)
        parameter.data.copy_(numbers)
    if tied and pipeline > 1:
        copies = [model.shared_embedding_or_output_weight().data]
        dist.broadcast(copies[0], 0)
    args = arguments(settings, tied)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    logits = forward(model, tokens, stage, pipeline)
    older = Path(name, "iter_0000008", f"mp_rank_{rank % tensor:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
    if rank == 0:
        Path(name, "iter_0000007").mkdir(parents=True)
    dist.barrier()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    dist_checkpointing.save({**state, "model": model.sharded_state_dict()}, f"{name}/iter_0000007")
    if name in ("megatron-llama", "megatron-llama-stages"):
        older.mkdir(parents=True)
        torch.save({**state, "model": model.state_dict_for_save_checkpoint()}, older / "model_optim_rng.pt")
    if rank == world - 1:
        np.savez_compressed(f"{name}/logits.npz", tokens=tokens.numpy(), logits=logits.numpy())
    dist.barrier()


@torch.no_grad()
def forward(model: torch.nn.Module, tokens: torch.Tensor, stage: int, pipeline: int) -> torch.Tensor:
    """Return the logits on the last stage, and what the stage sends to the next one on the others."""
    mask = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)[None, None]
    if stage > 0:
        received = torch.empty(TOKENS, 1, WIDTH)
        dist.recv(received, stage - 1)
        model.set_input_tensor(received)
    made = model(tokens, torch.arange(TOKENS)[None], mask)
    if stage < pipeline - 1:
        dist.send(made, stage + 1)
    return made


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29671", CUDA_DEVICE_MAX_CONNECTIONS="1")
    for name in sys.argv[2:] or CASES:
        ranks = CASES[name][2] * CASES[name][3]
        os.environ["WORLD_SIZE"] = str(ranks)
        mp.spawn(rank_main, (sys.argv[1], name), ranks)


if __name__ == "__main__":
    main()
