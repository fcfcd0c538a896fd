"""The command line `pi-compile`: options, the commands, their options, and how results are printed."""
