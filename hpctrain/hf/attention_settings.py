"""Settings of a config.json that several keys together stand for: rotary positions and sliding windows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.hf.config_keys import SIZE_MAX, ConfigKeys
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.model.rope_scaling import LinearRope, LongRope

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of blocks in the key `layer_types`."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary positions. The values are in `rope_parameters` (transformers 5) or `rope_scaling`.
    A base that is not there is in `rope_theta`."""

    modes: tuple[str, ...] = ("linear", "llama3", "yarn")
    """Scalings that the architecture's class computes and that hpctrain has."""
    base: float = 10_000.0
    """Base that transformers assumes if config.json states none."""
    partial: bool = False
    """Whether the architecture may rotate a part of each head (`partial_rotary_factor`)."""
    local: float | None = None
    """Base that transformers assumes in blocks with a window; None: blocks with a window have the base of the others.
    If it is given, `rope_parameters` has an entry for each kind of block, and `rope_scaling` holds for the blocks
    without a window."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        key, values = self._values(keys)
        fields: dict[str, Any] = {"rope_base": self._number(keys, key, values, "rope_theta", self.base)}
        if self.local is not None:
            fields["window_rope_base"] = self._local_base(keys)
        partial = values.get("partial_rotary_factor", keys.get("partial_rotary_factor"))
        if self.partial and partial not in (None, 1, 1.0):
            fields["rotary_dim"] = self._rotary_dim(keys, partial)
        elif partial not in (None, 1, 1.0):
            keys.refuse("partial_rotary_factor" if "partial_rotary_factor" not in values else key, "1")
        mode = values.get("rope_type", values.get("type", "default"))
        if "longrope" in self.modes and mode in ("su", "yarn"):
            mode = "longrope"  # its names in early folders of Phi-3
        if mode != "default":
            fields["rope_scaling"] = self._scaling(keys, key, values, mode)
        return fields

    def write(self, spec: DecoderSpec) -> dict[str, Any]:
        config: dict[str, Any] = {"rope_theta": spec.rope_base, "rope_scaling": None}
        if self.local is not None:
            config["rope_local_base_freq"] = spec.window_rope_base or spec.rope_base
        if self.partial:
            config["partial_rotary_factor"] = spec.rotary_width / spec.head_width
        scaling = spec.rope_scaling
        if scaling is not None:
            values = scaling.to_json()
            config["rope_scaling"] = {"rope_type": values.pop("mode"), **values}
            if not isinstance(scaling, LinearRope):
                config["rope_scaling"]["original_max_position_embeddings"] = values["original_positions"]
                del config["rope_scaling"]["original_positions"]
            if isinstance(scaling, LongRope):
                config["original_max_position_embeddings"] = scaling.original_positions
        return config

    def _values(self, keys: ConfigKeys) -> tuple[str, Mapping[str, Any]]:
        """Return the key of the config.json with the settings of the rotary positions, and the settings."""
        for key in ("rope_scaling", "rope_parameters"):
            values = keys.get(key)
            if self.local is not None and key == "rope_parameters" and isinstance(values, dict):
                values = values.get(FULL)
            if isinstance(values, dict) and values:
                return key, values
            if values:
                keys.refuse(key, "null or a mapping")
        return "rope_theta", {}

    def _local_base(self, keys: ConfigKeys) -> float:
        parameters = keys.get("rope_parameters")
        values = parameters.get(SLIDING) if isinstance(parameters, dict) else None
        values = values if isinstance(values, dict) else {}
        if values.get("rope_type", "default") != "default":
            keys.refuse("rope_parameters", f"rope_type default in {SLIDING}")
        base = values.get("rope_theta", keys.get("rope_local_base_freq", self.local))
        return _positive(keys, "rope_parameters" if values else "rope_local_base_freq", "rope_theta", base)

    def _number(self, keys: ConfigKeys, key: str, values: Mapping[str, Any], inner: str, default: float) -> float:
        if values.get(inner) is not None:
            return _positive(keys, key, inner, values[inner])
        return keys.number("rope_theta", default)

    def _rotary_dim(self, keys: ConfigKeys, partial: Any) -> int | None:
        key = "partial_rotary_factor" if keys.get("partial_rotary_factor") is not None else "rope_parameters"
        share = _positive(keys, key, "partial_rotary_factor", partial)
        width = keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads") or 1)
        return int(width * min(share, 1.0)) or None

    def _scaling(self, keys: ConfigKeys, key: str, values: Mapping[str, Any], mode: Any) -> Any:
        if mode not in self.modes:
            reasons = {"dynamic": "; dynamic changes the angles with the length of each text"}
            reason = reasons.get(mode, "") if isinstance(mode, str) else ""
            keys.refuse(key, f"rope_type {', '.join(('default', *self.modes))}{reason}")
            return None

        def number(inner: str, default: float | None = None) -> float:
            value = values.get(inner)
            return _positive(keys, key, inner, default if value is None else value)

        if mode == "linear":
            return {"mode": mode, "factor": number("factor")}
        positions = self._original_positions(keys, key, values)
        if mode == "longrope":
            return self._longrope(keys, key, values, positions)
        factor = number("factor")
        if mode == "yarn":
            attention = values.get("attention_factor")
            scales = values.get("mscale"), values.get("mscale_all_dim")
            if attention is not None:
                attention = number("attention_factor")
            elif all(scales) and factor > 1:
                top, bottom = (0.1 * number(name) * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim"))
                attention = top / bottom
            return {
                "mode": mode, "factor": factor, "original_positions": positions, "attention_factor": attention,
                "beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0),
                "truncate": values.get("truncate", True) is not False,
            }  # fmt: skip
        turns = {name: number(name) for name in ("low_freq_factor", "high_freq_factor")}
        return {"mode": mode, "factor": factor, **turns, "original_positions": positions}

    def _original_positions(self, keys: ConfigKeys, key: str, values: Mapping[str, Any]) -> int:
        """Return the length in tokens of the longest sequence before the scaling, from
        `original_max_position_embeddings`; if this key is absent, from `max_position_embeddings`."""
        name = "original_max_position_embeddings"
        given = (keys.get(name), values.get(name), keys.get("max_position_embeddings"))
        longest = next((value for value in given if value is not None), None)
        if isinstance(longest, int) and not isinstance(longest, bool) and 1 < longest <= SIZE_MAX:
            return longest
        keys.refuse(key, f"{name} as a whole number above 1")
        return 2

    def _longrope(self, keys: ConfigKeys, key: str, values: Mapping[str, Any], positions: int) -> dict[str, Any]:
        lists = {}
        for name in ("short_factor", "long_factor"):
            factors = values.get(name)
            factors = factors if isinstance(factors, list) and len(factors) <= 2**16 else [None]
            lists[name] = tuple(_positive(keys, key, name, factor) for factor in factors)
        attention = values.get("attention_factor")
        if attention is None:
            given = values.get("factor")
            longest = keys.size("max_position_embeddings", positions)
            factor = longest / positions if given is None else _positive(keys, key, "factor", given)
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(positions))
        attention = _positive(keys, key, "attention_factor", attention)
        return {"mode": "longrope", **lists, "original_positions": positions, "attention_factor": attention}


@dataclass(frozen=True)
class Windows:
    """The sliding window (`sliding_window`), and the blocks without one."""

    default: int | None = None
    """Window that transformers assumes if the key is absent."""
    enabled_by: str | None = None
    """Key that must be true for a window; None: there is none."""
    first_full: tuple[str, int] | None = None
    """Key with the number of blocks before the first one with a window, and its default; used without `layer_types`.
    If this field and `full_every` are None, all blocks have the window."""
    full_every: tuple[str | None, int] | None = None
    """Key with a number n, and its default: every n-th block has no window; used without `layer_types`. With None as
    key, n is always the default."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        off = self.enabled_by is not None and not keys.flag(self.enabled_by, False)
        if off or keys.get("sliding_window", self.default) is None:
            return {}
        window, layers = keys.size("sliding_window", self.default), keys.size("num_hidden_layers")
        full = self._full_blocks(keys, layers)
        return {} if len(full) == layers else {"window": window, "full_blocks": full}

    def write(self, spec: DecoderSpec) -> dict[str, Any]:
        config: dict[str, Any] = {"sliding_window": spec.window}
        if self.enabled_by is not None:
            config[self.enabled_by] = spec.window is not None
        if self.first_full is not None or self.full_every is not None:
            windows = [spec.block_window(block) for block in range(spec.layers)]
            config["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        return config

    def _full_blocks(self, keys: ConfigKeys, layers: int) -> tuple[int, ...]:
        if self.first_full is None and self.full_every is None:
            return ()
        kinds = keys.get("layer_types")
        if kinds is not None:
            if isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds):
                return tuple(block for block, kind in enumerate(kinds) if kind == FULL)
            keys.refuse("layer_types", f"null, or {FULL} or {SLIDING} for each of num_hidden_layers {layers}")
            return ()
        blocks = range(min(layers, 2**12))
        if self.first_full is not None:
            first = keys.get(self.first_full[0], self.first_full[1])
            if isinstance(first, int) and not isinstance(first, bool) and 0 <= first <= SIZE_MAX:
                return tuple(blocks[:first])
            keys.refuse(self.first_full[0], "a whole number")
            return ()
        assert self.full_every is not None
        key, every = self.full_every
        every = every if key is None else keys.size(key, every)
        return tuple(block for block in blocks if (block + 1) % every == 0)


def _positive(keys: ConfigKeys, key: str, inner: str, value: Any) -> float:
    """Return `value` if it is a number above 0; else record an error at `key` and return 1.

    Args:
        inner: name of the value in the error: `key` itself, or a key within the mapping at `key`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    keys.refuse(key, f"{inner} as a number above 0")
    return 1.0
