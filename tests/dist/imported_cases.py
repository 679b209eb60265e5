"""The example of docs/own-model.md, and a model of transformers, under several plans; called by the test beside it.

python imported_cases.py WORLD FOLDER   every plan of that many ranks against one process
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples" / "own_model" / "code"))

import torch
from cases import EMBEDDING, HALF, SEED, SEQ, UNEVEN, V_ENDS, V_OWNER, WHOLE, make_plan, run_equivalence
from processes import launch, process_group

from hpctrain.model.from_transformers.describe import FolderRequest, describe_folder
from hpctrain.model.imported.describe import DescribeRequest, describe
from hpctrain.records.model.transformers_spec import TransformersSpec

SPLIT = {
    "attention.wq": "columns",
    "attention.wk": "columns",
    "attention.wv": "columns",
    "attention.wo": "rows",
    "up": "columns",
    "down": "rows",
}
PLANS = {
    "pp2": make_plan(2, 1, 1, HALF, [(2, 4)]),
    "pp2 uneven": make_plan(2, 1, 1, UNEVEN, [(1, 8)]),
    "pp2 embedding alone": make_plan(2, 1, 1, EMBEDDING, [(2, 4)], "gpipe"),
    "dp2": make_plan(1, 2, 1, WHOLE, [(2, 3), (1, 2)]),
    "tp2": make_plan(1, 1, 2, WHOLE, [(4, 2)]),
    "tp2, two stages": make_plan(1, 1, 2, HALF, [(2, 4)], "interleaved_1f1b"),
}

ZBV = make_plan(2, 1, 1, V_ENDS, [(4, 2)], "zbv", owner=V_OWNER)
UNEVEN_PP2 = make_plan(2, 1, 1, UNEVEN, [(1, 8)])
ZERO3 = make_plan(1, 2, 1, WHOLE, [(2, 2), (2, 2)], zero=3)
TWO_STAGES = make_plan(1, 2, 1, HALF, [(2, 2), (2, 2)], "interleaved_1f1b", zero=1)
RECOMPUTED = UNEVEN_PP2.model_copy(
    update={"stages": [stage.model_copy(update={"recompute": "full"}) for stage in UNEVEN_PP2.stages]}
)
GATED = {"intermediate_size": 48, "num_key_value_heads": 2}
BUILT_BY_TRANSFORMERS = {
    # The embedding has a norm and is tied; the blocks return tuples and get position biases.
    "bloom": ({}, [ZBV, UNEVEN_PP2, ZERO3]),
    # Parallel blocks of which some have a window, scaled logits, tied.
    "cohere2": (
        {**GATED, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        [ZBV, RECOMPUTED, TWO_STAGES],
    ),
    # Multipliers of embedding, residuals and logits.
    "granite": (
        {**GATED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        [UNEVEN_PP2, ZERO3],
    ),
    # One head of keys and values, blocks that add attention and feed-forward together.
    "falcon": ({"alibi": False}, [RECOMPUTED]),
}


def built_by_transformers(folder: Path, kind: str, **more: Any) -> TransformersSpec:
    import transformers

    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, **more
    )
    torch.manual_seed(SEED)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    spec = describe_folder(FolderRequest(str(folder), "a test", SEQ, SEED)).spec
    assert isinstance(spec, TransformersSpec)
    return spec


def equivalence(folder: Path, rank: int, world: int) -> dict[str, Any]:
    arguments = {"layers": 4, "dim": 32, "heads": 4}
    spec = describe(DescribeRequest("gpt:make", arguments, None, None, None, SPLIT, 64, SEQ, SEED))
    cases = {name: (plan, spec) for name, plan in PLANS.items()}
    for kind, (more, plans) in BUILT_BY_TRANSFORMERS.items():
        model = built_by_transformers(folder / f"{kind}-{rank}", kind, **more)
        cases |= {f"{kind} {number}": (plan, model) for number, plan in enumerate(plans)}
    with process_group(folder, rank, world):
        return {name: run_equivalence(plan, model, rank) for name, (plan, model) in cases.items()}


if __name__ == "__main__":
    launch(equivalence, int(sys.argv[2]), sys.argv[3])
