"""One adapter a family of models, and the registry of them."""
