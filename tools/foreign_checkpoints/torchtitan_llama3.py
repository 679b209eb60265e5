# mypy: ignore-errors
"""Writes a checkpoint of torchtitan's llama3 and the logits of the model, on a CPU.

pip install torchtitan==0.3.0
python torchtitan_llama3.py tests/golden/checkpoints
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

WIDTH, HEADS, GROUPS, HIDDEN, VOCABULARY, TOKENS = 16, 4, 2, 24, 32, 128
INIT = {"weight": torch.nn.init.normal_}


def model(tied: bool, scaling: str) -> Llama3Model:
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=TOKENS, theta=500_000.0, scaling=scaling)
    layers = _build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=HEADS, n_kv_heads=GROUPS, hidden_dim=HIDDEN, rope=rope, attn_backend="flex"
    )
    made = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=INIT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=INIT),
        layers=layers,
    ).build()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return made


def main() -> None:
    os.chdir(sys.argv[1])
    for name, tied, scaling in (("torchtitan", False, "llama"), ("torchtitan-tied", True, "none")):
        torch.manual_seed(0)
        made = model(tied, scaling)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
        positions = torch.arange(TOKENS)[None]
        with torch.no_grad():
            logits = made(tokens, positions, made.get_attention_masks(positions))
        Path(name).mkdir()
        dcp.save(ModelWrapper(made).state_dict(), checkpoint_id=f"{name}/step-10", no_dist=True)
        np.savez_compressed(f"{name}/logits.npz", tokens=tokens.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()
