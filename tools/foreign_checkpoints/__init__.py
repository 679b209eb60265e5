"""Small checkpoints that other tools write themselves, for the tests of `hpctrain convert`. Each script needs an
environment of its own with its tool, besides torch; `tests/golden/checkpoints` holds what the scripts wrote."""
