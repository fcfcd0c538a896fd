"""`python -m pi_runtime`: the same as `pi-run`."""

from pi_runtime.cli import main

main()
