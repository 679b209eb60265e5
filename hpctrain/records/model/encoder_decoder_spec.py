"""An encoder-decoder like T5, and its counts of parameters, FLOPs and bytes. Encoder and decoder blocks differ, so the
counts of a stage depend on the cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from hpctrain.records.format.document import LAYERS_MAX, SEQ_MAX, WIDTH_MAX, content_sha256
from hpctrain.records.model.block_stack import TransformerSpec, require_family
from hpctrain.records.model.span_corruption import longest_text


class EncoderDecoderSpec(TransformerSpec):
    """A Transformer like T5 (Raffel et al. 2020): RMSNorm before each attention and feed-forward layer, relative
    positions, no biases.

    Blocks [0, encoder_layers) are the encoder's, the others are the decoder's. If the model is cut within the decoder,
    stage messages carry the encoder's output beside the decoder's residual stream.
    """

    model_config = ConfigDict(json_schema_extra=require_family)

    family: Literal["encoder_decoder"] = "encoder_decoder"
    """The kind of Transformer."""
    layers: int = Field(ge=2, le=LAYERS_MAX)
    """Number of blocks of encoder and decoder together."""
    encoder_layers: int | None = Field(default=None, ge=1, le=LAYERS_MAX)
    """Number of blocks of the encoder. Default: half of `layers`."""
    head_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width of an attention head. Default: `dim / heads`."""
    ffn_dim: int | None = Field(default=None, ge=1, le=WIDTH_MAX)
    """Width inside the feed-forward layer. Default: 4 times `dim`."""
    gated: bool = False
    """Whether feed-forward layers have a gated GELU (T5 v1.1) in place of a ReLU (T5 v1.0)."""
    tied: bool = True
    """Whether the head uses the embedding's matrix, and the head's input is scaled by dim^-0.5 (T5 v1.0)."""
    buckets: int = Field(default=32, ge=4, le=SEQ_MAX, multiple_of=4)
    """Number of buckets of relative positions; the positions of one bucket share a learned bias in attention."""
    max_distance: int = Field(default=128, ge=2, le=SEQ_MAX)
    """Distance in tokens from which all relative positions share a bucket."""
    decoder_seq: int | None = Field(default=None, ge=1, le=SEQ_MAX)
    """Tokens in a decoder's sequence. Default: the number of targets of span corruption."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Number added under the root in RMSNorm."""

    @model_validator(mode="after")
    def _check(self) -> EncoderDecoderSpec:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}; give head_dim")
        if self.seam >= self.layers:
            raise ValueError(f"encoder_layers {self.seam} leaves no decoder block of {self.layers} layers")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(f"max_distance {self.max_distance} is not more than half of buckets {self.buckets}")
        return self

    def sha256(self) -> str:
        """Return the SHA-256 of the dimensions except `decoder_seq`, on which weights do not depend."""
        return content_sha256(self.model_copy(update={"decoder_seq": None}))

    @property
    def seam(self) -> int:
        """Return the number of the first decoder block. The cut before this block separates encoder and decoder; no
        other cut has smaller stage messages."""
        return self.encoder_layers or self.layers // 2

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def inner(self) -> int:
        """Return the width of queries, keys and values over all attention heads."""
        return self.heads * self.head_width

    @property
    def hidden(self) -> int:
        return self.ffn_dim or 4 * self.dim

    def target_length(self, seq_len: int) -> int:
        """Return the number of tokens in a decoder's sequence, if the encoder's sequence has `seq_len` tokens."""
        return self.decoder_seq or longest_text(seq_len).outputs

    @property
    def supports_sequence_parallel(self) -> bool:
        """Return False, because stage messages hold the residual streams of encoder and decoder, joined along the
        sequence."""
        return False

    @property
    def can_split_backward(self) -> bool:
        """Return False: several blocks of a stage use the same table of relative positions, and torch cannot compute
        the backward for weights (W) alone if a stage uses a weight more than once."""
        return False

    def block_parameters(self, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of a block: the mean over all blocks, rounded
        up."""
        decoders = self.layers - self.seam
        return -(-(self.seam * self._encoder_block(tp) + decoders * self._decoder_block(tp)) // self.layers)

    def end_parameters(self, tp: int = 1, *, first: bool, last: bool) -> int:
        """Return the number of parameters that one of `tp` devices holds of the model's `first` or `last` stage outside
        its blocks. It is assumed that the first decoder block is in the last stage."""
        shards = self.head_shards(tp)
        tables = int(first or last) + int(last and not self.tied)
        return tables * self.embedding_parameters() // shards + self._table(tp) * (first + last) + 2 * self.dim * last

    def stage_parameters(self, blocks: int, tp: int = 1, *, first: bool, last: bool) -> int:
        if first:
            return self.parameters(0, blocks, tp)
        if last:
            return self.parameters(self.layers - blocks, self.layers, tp)
        # A stage around the seam also holds an embedding, and decoder blocks are the larger ones.
        decoders = min(blocks, self.layers - self.seam)
        count = decoders * self._decoder_block(tp) + (blocks - decoders) * self._encoder_block(tp)
        return count + self.embedding_parameters() // self.head_shards(tp) + self.dim + 2 * self._table(tp)

    def mean_blocks(self, blocks: int, seq_len: int, *, first: bool, last: bool) -> tuple[float, float]:
        """Return the size of a stage, in blocks of mean size: (by FLOPs, by activations kept for the backward pass). It
        is unknown which blocks a stage holds that is neither first nor last. So each of its blocks counts with the mean
        FLOPs, and with the activations of the larger kind of block."""
        flops, saved = self._block_flops(seq_len), self._saved_values(seq_len)
        if first or last:
            encoders = min(blocks, self.seam) if first else max(0, blocks - (self.layers - self.seam))
            decoders = blocks - encoders
            done, held = (encoders * sizes[0] + decoders * sizes[1] for sizes in (flops, saved))
            return done / self._mean(*flops), held / self._mean(*saved)
        return blocks, blocks * max(saved) / self._mean(*saved)

    @property
    def preferred_cut(self) -> int | None:
        """Return the number of the first decoder block. At the cut before this block, stage messages hold only the
        encoder's residual stream."""
        return self.seam

    def parameters(self, start: int = 0, stop: int | None = None, tp: int = 1) -> int:
        """Return the number of parameters that one of `tp` devices holds of a stage with blocks [start, stop); `stop`
        None: all blocks from `start` on.

        The stage of the first decoder block also holds a copy of the embedding and the encoder's last norm. Each stage
        holds the tables of relative positions that its blocks use.
        """
        stop = self.layers if stop is None else stop
        first, seam, last = start == 0, start <= self.seam < stop, stop == self.layers
        encoders, decoders = max(0, min(stop, self.seam) - start), max(0, stop - max(start, self.seam))
        tables = int(first or seam or (last and self.tied)) + int(last and not self.tied)
        count = encoders * self._encoder_block(tp) + decoders * self._decoder_block(tp)
        count += tables * self.embedding_parameters() // self.head_shards(tp) + self.dim * (seam + last)
        return count + self._table(tp) * (bool(encoders) + bool(decoders))

    def forward_flops(self, sequences: int, seq_len: int, start: int = 0) -> float:
        """Return the FLOPs of a forward pass of `sequences` sequences through the blocks from number `start` on, and
        through the head. The decoder's causal mask saves no FLOPs, because relative positions are added to all
        attention scores."""
        encoder, decoder = self._block_flops(seq_len)
        flops = max(0, self.seam - start) * encoder + (self.layers - max(start, self.seam)) * decoder
        return sequences * (flops + 2.0 * self.target_length(seq_len) * self.vocabulary * self.dim)

    def boundary_length(self, seq_len: int, cut: int | None = None) -> int:
        """Return the number of sequence positions in a stage message at a cut before block number `cut`. Up to the
        first decoder block, a message has the encoder's positions. After it, or if `cut` is None, a message has the
        positions of encoder and decoder."""
        both = cut is None or cut > self.seam
        return seq_len + (self.target_length(seq_len) if both else 0)

    def shared_weights(self, cuts: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """Return name of a weight -> numbers of the stages that hold a copy, for each weight that several stages hold.

        Such weights are the embedding (in the first stages of encoder and decoder, and at a tied head) and the tables
        of relative positions of encoder and decoder.

        Args:
            cuts: the blocks [from, to) of each stage, in order.
        """
        stages = range(len(cuts))
        cut_at_seam = {stage for stage in stages if cuts[stage][0] <= self.seam < cuts[stage][1]}
        holders = {
            "embedding.weight": sorted({0} | cut_at_seam | ({len(cuts) - 1} if self.tied else set())),
            "relative_encoder.weight": [stage for stage in stages if cuts[stage][0] < min(cuts[stage][1], self.seam)],
            "relative_decoder.weight": [stage for stage in stages if max(cuts[stage][0], self.seam) < cuts[stage][1]],
        }
        return {name: stages for name, stages in holders.items() if len(stages) > 1}

    def activation_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of activations that a block keeps for its backward pass, on one of `tp` devices, for a
        micro-batch of `sequences` sequences: the mean over all blocks.

        The bytes are counted from the code of the block. Each norm keeps its input, the normalised input and its output
        (3·`dim` numbers per token). An attention keeps queries, keys, values and its output. A self-attention also
        keeps the softmax of its scores, because torch has no fused attention that trains the added relative positions.
        A ReLU keeps its output, a gated GELU four numbers for each number of its width.
        """
        whole, split = self._mean(*self._whole(seq_len)), self._mean(*self._split(seq_len))
        return int(sequences * bytes_per_value * (whole + split / tp))

    def residual_stream_bytes(self, sequences: int, seq_len: int, bytes_per_value: int = 4) -> int:
        """Return the part of `activation_bytes` that tensor parallelism does not split: the bytes that norms keep."""
        return int(sequences * bytes_per_value * self._mean(*self._whole(seq_len)))

    def matmul_output_bytes(self, sequences: int, seq_len: int, tp: int = 1, bytes_per_value: int = 4) -> int:
        """Return the bytes of the results of a block's matrix products, attention scores included, on one of `tp`
        devices: the mean over all blocks. Selective recomputation keeps these results."""
        whole = self._mean(2 * seq_len * self.dim, 3 * self.target_length(seq_len) * self.dim)
        split = self._mean(*self._split(seq_len, gated=2))
        return int(sequences * bytes_per_value * (whole + split / tp))

    def _block_flops(self, seq_len: int) -> tuple[float, float]:
        """Return the forward FLOPs of one sequence: (in an encoder block, in a decoder block)."""
        source, target = seq_len, self.target_length(seq_len)
        matrices = 2.0 * (4 * self.dim * self.inner + self._feed_forward)
        encoder = source * (matrices + 4.0 * source * self.inner)
        decoder = target * (matrices + 4.0 * target * self.inner)
        cross = 4.0 * self.dim * self.inner * (source + target) + 4.0 * source * target * self.inner
        return encoder, decoder + cross

    def _whole(self, seq_len: int) -> tuple[float, float]:
        """Return the number of values that the norms of a block keep for the backward pass of one sequence: (in an
        encoder block, in a decoder block)."""
        return 6.0 * seq_len * self.dim, 9.0 * self.target_length(seq_len) * self.dim

    def _split(self, seq_len: int, gated: int = 4) -> tuple[float, float]:
        """Return the number of values that attention and feed-forward layer keep for the backward pass of one sequence:
        (in an encoder block, in a decoder block). Tensor parallelism splits these values.

        Args:
            gated: tensors of the feed-forward layer's inner width (`hidden`) that a gated layer keeps; a layer with
                ReLU keeps one.
        """
        source, target = seq_len, self.target_length(seq_len)
        shared = 4 * self.inner + (gated if self.gated else 1) * self.hidden
        encoder = source * (shared + self.heads * source)
        decoder = target * (shared + 2 * self.inner + self.heads * target) + 2 * source * self.inner
        return encoder, decoder

    def _saved_values(self, seq_len: int) -> tuple[float, float]:
        """Return the number of values that a whole block, without tensor parallelism, keeps for the backward pass of
        one sequence: (in an encoder block, in a decoder block)."""
        whole, split = self._whole(seq_len), self._split(seq_len)
        return whole[0] + split[0], whole[1] + split[1]

    def _mean(self, encoder: float, decoder: float) -> float:
        return (self.seam * encoder + (self.layers - self.seam) * decoder) / self.layers

    @property
    def _feed_forward(self) -> int:
        return (3 if self.gated else 2) * self.dim * self.hidden

    def _table(self, tp: int) -> int:
        """Return the number of parameters that one of `tp` devices holds of a table of relative positions, which has
        one parameter for each bucket and attention head."""
        return self.buckets * self.heads // tp

    def _encoder_block(self, tp: int) -> int:
        return (4 * self.dim * self.inner + self._feed_forward) // tp + 2 * self.dim

    def _decoder_block(self, tp: int) -> int:
        return (8 * self.dim * self.inner + self._feed_forward) // tp + 3 * self.dim
