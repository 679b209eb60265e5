"""Makes a corpus folder from input files: cleaning, the tokenizer, parallel encoding, and checks."""
