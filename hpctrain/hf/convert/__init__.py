"""Checkpoints of other tools, made into Hugging Face folders: torch's distributed checkpoints (DCP), torchtitan,
Megatron. Pickles in them are read as data; nothing in them is run, and torch is not needed."""
