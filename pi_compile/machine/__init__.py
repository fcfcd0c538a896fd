"""Machines: measuring one, its profile on disk, and what is installed."""
