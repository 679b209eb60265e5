"""Prints and compares topology files, and converts them from and to other tools' formats."""
