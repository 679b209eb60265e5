"""The files of a corpus folder, and the recipe for several of them."""
