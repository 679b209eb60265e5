"""Layouts: which devices compute which blocks and micro-batches, and how to distribute blocks and micro-batches over
devices.
"""
