"""The server's protocols: a request's JSON becomes a job for the engine, and what the engine gives becomes an answer.

Everything here is a pure function or an object with state of one request. Nothing here waits, reads or sends.
"""
