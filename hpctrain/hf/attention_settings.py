"""Settings of a config.json that several keys together stand for: rotary positions and sliding windows. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.hf.config_keys import SIZE_MAX, ConfigKeys
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.families import Gpt2Spec
from hpctrain.records.model.rope_scaling import LinearRope, LongRope

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of blocks in the key `layer_types`."""
_ORIGINAL = "original_max_position_embeddings"

FullBlocks = Callable[[ConfigKeys, range], tuple[int, ...]]
"""Returns those of the given blocks that have no window, by keys of a config.json."""


@dataclass(frozen=True)
class _RopeValues:
    """The mappings of a config.json with settings of rotary positions. The first one that has a setting holds."""

    keys: ConfigKeys
    mappings: tuple[tuple[str, Mapping[str, Any]], ...]
    """Key and value of each mapping; at least one."""

    def get(self, name: str, default: Any = None) -> tuple[str, Any]:
        """Return the key of the mapping that has the setting, and its value; if none has it, the first key and
        `default`."""
        given = ((key, values[name]) for key, values in self.mappings if name in values)
        return next(given, (self.mappings[0][0], default))

    def number(self, name: str, default: float | None = None) -> float:
        """Return the setting, `default` if it is absent or null. If the result is no number above 0, record an error
        and return 1."""
        key, value = self.get(name)
        return self.keys.positive(key, default if value is None else value, name)

    def mode(self) -> tuple[str, Any]:
        """Return the key of the mapping that has the kind of scaling, and the kind; 'default' if none has it."""
        for name in ("rope_type", "type"):
            key, mode = self.get(name)
            if mode is not None:
                break
        return key, "default" if mode is None else mode


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary positions, and the share of each head that is rotated. config.json has them in one
    of the mappings `rope_scaling` and `rope_parameters` (transformers 5); base and share may have top-level keys
    instead."""

    modes: tuple[str, ...] = ("linear", "llama3", "yarn")
    """Scalings that the architecture's class computes and that hpctrain has."""
    base: float = 10_000.0
    """Base that transformers assumes if config.json states none."""
    base_key: str = "rope_theta"
    """Top-level key of the base."""
    share: float | None = None
    """Share of each head that transformers rotates if config.json states none; None: hpctrain's model can only rotate
    whole heads."""
    share_key: str = "partial_rotary_factor"
    """Top-level key of the share."""
    original: int | None = None
    """Value that transformers assumes if the top-level key `original_max_position_embeddings` or
    `max_position_embeddings` is absent; None: `original_max_position_embeddings` is then looked for in the mappings."""
    by_kind: bool = False
    """Whether `rope_parameters` has a mapping for each kind of block. `rope_scaling` then has priority over the mapping
    of the blocks without a window."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        values = self._values(keys)
        fields: dict[str, Any] = {}
        key, base = values.get("rope_theta")
        if base is None:
            keys.names["rope_base"] = self.base_key
            fields["rope_base"] = keys.number(self.base_key, self.base)
        else:
            keys.names["rope_base"] = f"{key}.rope_theta"
            fields["rope_base"] = values.number("rope_theta")
        key, share = values.get("partial_rotary_factor")
        if share is None:
            key, share = self.share_key, keys.get(self.share_key, self.share)
        if self.share is not None:
            fields |= self._rotary_dim(keys, key, share)
        elif share not in (None, 1):
            keys.refuse(key, "1" if key == self.share_key else "partial_rotary_factor 1")
        keys.names["rope_scaling"], mode = values.mode()
        if "longrope" in self.modes and mode in ("su", "yarn"):
            mode = "longrope"  # its names in early folders of Phi-3
        if mode != "default":
            fields["rope_scaling"] = self._scaling(values, mode)
        return fields

    def write(self, spec: DecoderSpec | Gpt2Spec) -> dict[str, Any]:
        config: dict[str, Any] = {self.base_key: spec.rope_base}
        if self.share is not None:
            config[self.share_key] = (spec.rotary_dim or spec.head_width) / spec.head_width
        if not isinstance(spec, DecoderSpec):
            return config
        config["rope_scaling"] = None
        scaling = spec.rope_scaling
        if scaling is not None:
            values = scaling.to_json()
            config["rope_scaling"] = {"rope_type": values.pop("mode"), **values}
            if not isinstance(scaling, LinearRope):
                config["rope_scaling"][_ORIGINAL] = values["original_positions"]
                del config["rope_scaling"]["original_positions"]
            if isinstance(scaling, LongRope):
                config[_ORIGINAL] = scaling.original_positions
        return config

    def _values(self, keys: ConfigKeys) -> _RopeValues:
        scaling = _mapping(keys, "rope_scaling", keys.get("rope_scaling"))
        parameters = _mapping(keys, "rope_parameters", keys.get("rope_parameters"))
        if self.by_kind:
            # So the older key `type` in rope_scaling counts only beside rope_parameters.
            absent = {"rope_type": "default"} if keys.get("rope_parameters") is None else None
            parameters = _mapping(keys, "rope_parameters", parameters.get(FULL, absent))
        if scaling and not self.by_kind:
            parameters = {}
        given = (("rope_scaling", scaling), ("rope_parameters", parameters))
        return _RopeValues(keys, tuple(item for item in given if item[1]) or given[1:])

    def _rotary_dim(self, keys: ConfigKeys, key: str, share: Any) -> dict[str, int]:
        heads = keys.size("num_attention_heads")
        width = keys.size("head_dim", keys.size("hidden_size") // heads or 1)
        if keys.get("head_dim") is None and keys.size("hidden_size") % heads:
            return {}  # the spec refuses such heads
        share = keys.positive(key, share, None if key == self.share_key else "partial_rotary_factor")
        rotated = int(width * share)
        if share > 1 or rotated < 2 or rotated % 2:
            keys.refuse(key, f"a share of the {width} numbers of a head that is an even number of them, at least 2")
            return {}
        # A GPT-2 without the field has learned positions.
        return {} if rotated == width and self.share == 1.0 else {"rotary_dim": rotated}

    def _scaling(self, values: _RopeValues, mode: Any) -> Any:
        if mode not in self.modes:
            reasons = {"dynamic": "; dynamic changes the angles with the length of each text"}
            reason = reasons.get(mode, "") if isinstance(mode, str) else ""
            values.keys.refuse(values.mode()[0], f"rope_type {', '.join(('default', *self.modes))}{reason}")
            return None
        if mode == "linear":
            return {"mode": mode, "factor": values.number("factor")}
        positions = self._original_positions(values)
        if mode == "longrope":
            return self._longrope(values, positions)
        if mode == "yarn":
            return _yarn(values, positions)
        turns = {name: values.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        return {"mode": mode, "factor": values.number("factor"), **turns, "original_positions": positions}

    def _original_positions(self, values: _RopeValues) -> int:
        """Return the length in tokens of the longest sequence before the scaling, from
        `original_max_position_embeddings`; if this key is absent, from `max_position_embeddings`."""
        keys, (key, inside) = values.keys, values.get(_ORIGINAL)
        outside = keys.get(_ORIGINAL, self.original)
        given = ((_ORIGINAL, outside), (key, inside), (key, keys.get("max_position_embeddings")))
        key, longest = next((item for item in given if item[1] is not None), (key, None))
        values.keys.names["original_positions"] = _ORIGINAL
        if isinstance(longest, int) and not isinstance(longest, bool) and 1 < longest <= SIZE_MAX:
            return longest
        keys.refuse(key, f"{_ORIGINAL} as a whole number above 1")
        return 2

    def _longrope(self, values: _RopeValues, positions: int) -> dict[str, Any]:
        lists = {}
        for name in ("short_factor", "long_factor"):
            key, factors = values.get(name)
            factors = factors if isinstance(factors, list) and len(factors) <= 2**16 else [None]
            lists[name] = tuple(values.keys.positive(key, factor, name) for factor in factors)
        longest = values.keys.size("max_position_embeddings", self.original)
        factor = values.number("factor", longest / positions)
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(positions))
        attention = values.number("attention_factor", attention)
        return {"mode": "longrope", **lists, "original_positions": positions, "attention_factor": attention}


def _mapping(keys: ConfigKeys, key: str, value: Any) -> Mapping[str, Any]:
    """Return a value of the config.json that must be null or a mapping; {} for null."""
    if value and not isinstance(value, dict):
        keys.refuse(key, "null or a mapping")
        return {}
    return value or {}


def _yarn(values: _RopeValues, positions: int) -> dict[str, Any]:
    key, factor = values.get("factor")
    if factor is None and any("factor" in mapping for _, mapping in values.mappings):
        factor = values.keys.size("max_position_embeddings") / positions
    factor = values.keys.positive(key, factor, "factor")
    attention = None
    if values.get("attention_factor")[1] is not None:
        attention = values.number("attention_factor")
    elif factor > 1 and all(values.get(name)[1] for name in ("mscale", "mscale_all_dim")):
        top, bottom = (0.1 * values.number(name) * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim"))
        attention = top / bottom
    return {
        "mode": "yarn", "factor": factor, "original_positions": positions, "attention_factor": attention,
        "beta_fast": values.number("beta_fast", 32.0), "beta_slow": values.number("beta_slow", 1.0),
        "truncate": bool(values.get("truncate", True)[1]),
    }  # fmt: skip


def first_blocks(key: str, default: int) -> FullBlocks:
    """Return the rule by which the first blocks have no window.

    Args:
        key: key of config.json with the number of blocks without a window.
        default: number that transformers assumes if the key is absent.
    """

    def full(keys: ConfigKeys, blocks: range) -> tuple[int, ...]:
        first = keys.get(key, default)
        if isinstance(first, int) and not isinstance(first, bool) and 0 <= first <= SIZE_MAX:
            return tuple(blocks[:first])
        keys.refuse(key, "a whole number")
        return ()

    return full


def every_block(key: str | None, default: int) -> FullBlocks:
    """Return the rule by which every n-th block has no window.

    Args:
        key: key of n; None: n is always the default.
        default: n that transformers assumes if the key is absent.
    """

    def full(keys: ConfigKeys, blocks: range) -> tuple[int, ...]:
        every = default if key is None else keys.size(key, default)
        return tuple(block for block in blocks if (block + 1) % every == 0)

    return full


@dataclass(frozen=True)
class Windows:
    """The sliding window (`sliding_window`), the blocks without a window, and the base of the rotary positions in
    blocks with a window."""

    default: int | None = None
    """Window that transformers assumes if the key is absent."""
    enabled_by: str | None = None
    """Key that must be true for a window; None: the class has no such key."""
    full_blocks: FullBlocks | None = None
    """The blocks without a window if `layer_types` is absent; None: all blocks have the window, whatever `layer_types`
    says."""
    rope_base: float | None = None
    """Base that transformers assumes in blocks with a window; None: these have the same base as blocks without one."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        keys.names |= {"window": "sliding_window", "full_blocks": "layer_types"}
        off = self.enabled_by is not None and not keys.flag(self.enabled_by, False)
        no_window = off or keys.get("sliding_window", self.default) is None
        if no_window and (self.full_blocks is None or self.enabled_by is not None):
            return {}
        if no_window:
            keys.refuse(
                "sliding_window", "a whole number above 0, which transformers needs even if no block has a window"
            )
        layers = keys.size("num_hidden_layers")
        full = self._full_blocks(keys, layers)
        if len(full) == layers:
            return {}
        fields: dict[str, Any] = {"window": keys.size("sliding_window", self.default), "full_blocks": full}
        return fields if self.rope_base is None else fields | {"window_rope_base": self._rope_base(keys)}

    def write(self, spec: DecoderSpec) -> dict[str, Any]:
        config: dict[str, Any] = {"sliding_window": spec.window}
        if self.enabled_by is not None:
            config[self.enabled_by] = spec.window is not None
        elif self.full_blocks is not None:
            config["sliding_window"] = spec.window or self.default  # needed even if no block has a window
        if self.rope_base is not None:
            config["rope_local_base_freq"] = spec.window_rope_base or spec.rope_base
        if self.full_blocks is not None:
            windows = [spec.block_window(block) for block in range(spec.layers)]
            config["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        return config

    def _full_blocks(self, keys: ConfigKeys, layers: int) -> tuple[int, ...]:
        if self.full_blocks is None:
            return ()
        kinds = keys.get("layer_types")
        if kinds is None:
            return self.full_blocks(keys, range(min(layers, 2**12)))
        if isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds):
            return tuple(block for block, kind in enumerate(kinds) if kind == FULL)
        keys.refuse("layer_types", f"null, or {FULL} or {SLIDING} for each of num_hidden_layers {layers}")
        return ()

    def _rope_base(self, keys: ConfigKeys) -> float:
        parameters = keys.get("rope_parameters")
        inside = parameters.get(SLIDING) if isinstance(parameters, dict) else None
        values = _RopeValues(keys, (("rope_parameters", _mapping(keys, "rope_parameters", inside)),))
        if values.mode()[1] != "default":
            keys.refuse("rope_parameters", f"rope_type default in {SLIDING}")
        if values.get("rope_theta")[1] is not None:
            keys.names["window_rope_base"] = f"rope_parameters.{SLIDING}.rope_theta"
            return values.number("rope_theta")
        keys.names["window_rope_base"] = "rope_local_base_freq"
        return keys.number("rope_local_base_freq", self.rope_base)
