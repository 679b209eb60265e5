"""The largest numbers that a file may ask for: well above any real run, and small enough that work on them ends.

A number beyond them is a slip of the hand or an attack, and would otherwise show as a search without an end, as memory
that is used up, or as an overflow far away from the file.
"""

LAYERS_MAX = 4096
"""Blocks of a model; the deepest published ones have some thousand. A plan for so many is found in seconds."""
WIDTH_MAX = 2**22
"""Numbers in a row of a matrix."""
HEADS_MAX = 2**16
"""Attention heads of a block."""
VOCAB_MAX = 2**24
"""Tokens of a vocabulary; the largest ones have about a million."""
SEQ_MAX = 2**24
"""Tokens in a sequence."""
BATCH_MAX = 2**18
"""Sequences in a step; the largest published ones have 65,536. A plan for so many is found in seconds."""
TOKENIZER_BYTES = 256 * 2**20
"""Of a tokenizer.json; the largest ones have some 30 MB."""
STEPS_MAX = 10**9
"""Optimizer steps, and numbers that are counted in them."""
DEVICES_MAX = 2**20
"""Devices of a run."""
