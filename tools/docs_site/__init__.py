"""The site of the documents: hooks of MkDocs, and the pages of the reference, which are made from the code."""
