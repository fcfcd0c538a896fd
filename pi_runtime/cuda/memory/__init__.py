"""Memory of the GPU and the way to it: devices, weights, pinned buffers, workspaces."""
