"""The command line `pi-compile`: commands, their options, and how results are printed."""
