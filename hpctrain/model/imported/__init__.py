"""Models from the user's code (`model.import` in run.yaml): loads, checks, measures and cuts them, and reports their
errors.
"""
