"""Makes a corpus folder from input files: scan, cleaning, tokenizer, parallel encoding, and the check of a finished
folder."""
