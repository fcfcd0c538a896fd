"""Decodes one token on GPU and CPU: the operations of each, and the schedule that joins them."""
