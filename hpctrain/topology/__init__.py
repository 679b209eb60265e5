"""Topology files as people see them: printed, compared, read from other tools' formats."""
