"""Topologies in the files of other tools: one format a module, text in and text out."""
