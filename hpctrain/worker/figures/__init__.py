"""What a rank measures of itself and of its layers, and the file in which rank 0 writes it: metrics-ranks.jsonl."""
