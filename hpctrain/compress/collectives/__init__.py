"""How compressed gradients travel: gathered, exchanged or scattered over ranks."""
