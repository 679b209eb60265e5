"""What a process with torch is started for beside training: evaluate, export, describe a model."""
