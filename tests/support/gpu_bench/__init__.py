"""A benchmark of GPU and CPU together on made-up models: weights, placements, rivals and what is measured."""
