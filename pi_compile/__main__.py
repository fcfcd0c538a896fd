"""`python -m pi_compile`: the same as `pi-compile`."""

from pi_compile.cli.main import main

main()
