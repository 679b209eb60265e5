"""Models of plan.json and its parts: stages, schedule, compression, and the profile of measured steps. The section
`compression` of run.yaml has the same models."""
