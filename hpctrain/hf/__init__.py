"""Hugging Face folders without torch: config.json, names of tensors, safetensors files, tokenizers, and the start of a
run from such a folder."""
