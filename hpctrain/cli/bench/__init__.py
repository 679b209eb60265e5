"""The commands of `hpctrain bench`: their options and the tables that they print. The room `bench` makes the
measurements."""
