"""The feed-forward network of one expert: `network` is the page to begin with."""
