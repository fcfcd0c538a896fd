"""Engines side by side: each in a process of its own, taken in turns, compared round by round.

Its own process, because each brings its own OpenMP and its own choice of instruction set at import. A process that is
not asked waits in a blocking read and disturbs nobody.
"""
