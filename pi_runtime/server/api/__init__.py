"""The forms of API: a request's body becomes a `Prompt`, and what the engine gives becomes bytes.

Everything here is a pure function or an object with state of one request. Nothing here waits, reads or sends.
"""
