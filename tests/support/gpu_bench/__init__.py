"""A benchmark of GPU and CPU together on made-up models: weights, placements, baselines and what is measured."""
