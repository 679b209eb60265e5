"""Hugging Face folders without torch: configs, tensor names, shards, tokenizers, and the start of a run from one."""
