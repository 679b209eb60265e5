"""Decoders that transformers builds and hpctrain cuts into stages: for Hugging Face folders whose architecture is none
of hpctrain's own families.
"""
