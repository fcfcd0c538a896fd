"""What few bits cost, beside llama.cpp's quantiser: bytes of files, and perplexity on the same tokens."""
