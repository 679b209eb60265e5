"""From input files to a corpus folder: cleaning, the tokenizer, parallel encoding, and the checks."""
