"""One model serving many at once: each gets the text that it would get alone, whatever its company."""
