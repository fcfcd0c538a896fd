"""Compiled code of the disk tier."""
