"""`python -m pi_runtime`: the same as `pi-run`."""

from pi_runtime.commands.run import main

main()
