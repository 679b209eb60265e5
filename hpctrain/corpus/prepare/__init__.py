"""From input files to a corpus folder: cleaning, the tokenizer, encoding in parallel, and the checks."""
