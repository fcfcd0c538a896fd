"""The train stage: predictors are fitted, and each layer is given its rung."""
