"""The command line `pi-compile`: options, the commands, and how results are printed."""
