"""Container images for runs: built, checked, and entered with Apptainer, SingularityCE or pyxis."""
