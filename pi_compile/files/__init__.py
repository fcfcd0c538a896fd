"""Files that are read and written whole, and data that comes with the project."""
