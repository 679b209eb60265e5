"""Measures nodes, devices and the links between nodes, and makes a topology of them."""
