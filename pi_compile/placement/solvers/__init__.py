"""The solvers of a placement: integer programs that know nothing of models."""
