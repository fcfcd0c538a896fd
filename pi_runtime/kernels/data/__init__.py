"""What kernels read: stored matrices, tables of weights, quantised inputs, workspaces."""
