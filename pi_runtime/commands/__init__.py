"""`pi-run` and `pi-serve`: their options, what each does with them, and how its results are shown."""
