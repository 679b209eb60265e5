"""A GPT-2-like model (Radford et al. 2019): learned positions, LayerNorm before each part, GELU.

Shapes: tokens [batch, seq], hidden state x [batch, seq, dim], logits [batch, seq, vocabulary].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, seq_len: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(seq_len, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # -1: as many heads as the linears give, so that a device may hold some of them.
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, seq_len: int, layers: int, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, seq_len, dim, dropout)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def make(vocabulary: int, seq_len: int, layers: int = 4, dim: int = 64, heads: int = 4, dropout: float = 0.0) -> GPT:
    model = GPT(vocabulary, seq_len, layers, dim, heads, dropout)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model
