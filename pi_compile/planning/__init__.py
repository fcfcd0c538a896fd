"""What a machine would do with a model that is known by its config alone."""
