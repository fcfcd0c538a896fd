"""The solvers of a placement; they know integers and no model."""
