"""The table of architectures of transformers that hpctrain trains: for each class, the settings of its config.json and
the names of its tensors. Pure.

Keys and their defaults follow the configuration classes of transformers 4.45 to 5. A setting that hpctrain's models
lack is refused by name, because otherwise the run would silently train a model that computes something else.
"""

from __future__ import annotations

from hpctrain.hf.decoder_rows import decoder_rows
from hpctrain.hf.other_rows import other_rows

ARCHITECTURES = {row.name: row for rows in (decoder_rows(), other_rows()) for row in rows}
"""Name of a class of transformers -> its row. A model that did not start from a folder is exported as the first
class that has all of its settings."""
