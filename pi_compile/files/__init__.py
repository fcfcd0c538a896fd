"""Files that are written whole or not at all, and data that comes with the project."""
