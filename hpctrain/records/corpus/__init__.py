"""Models of the files of a corpus folder, and of a recipe from which several corpus folders are made."""
