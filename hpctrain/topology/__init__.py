"""Topology files for people: printed, compared, converted from and to other tools' formats."""
