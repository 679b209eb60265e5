"""The files of a corpus folder, and the recipe that one is made by."""
