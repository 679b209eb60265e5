"""The largest numbers that a file may contain: well above any real run, and small enough for the planner to finish.

A larger number is a typing error or an attack. Without these bounds it would cause an endless search, exhausted memory,
or an overflow far away from the file.
"""

LAYERS_MAX = 4096
"""Blocks of a model; the deepest published models have about a thousand. A plan for 4096 is found in seconds."""
WIDTH_MAX = 2**22
"""Numbers in a row of a matrix."""
HEADS_MAX = 2**16
"""Attention heads of a block."""
VOCAB_MAX = 2**24
"""Tokens of a vocabulary; the largest published ones have about a million."""
SEQ_MAX = 2**24
"""Tokens in a sequence."""
BATCH_MAX = 2**18
"""Sequences in a step; the largest published batches have 65,536. A plan for the bound is found in seconds."""
TOKENIZER_BYTES = 256 * 2**20
"""Bytes of a tokenizer.json; the largest ones have about 30 MB."""
STEPS_MAX = 10**9
"""Optimizer steps, and settings that are counted in steps."""
DEVICES_MAX = 2**20
"""Devices of a run."""
