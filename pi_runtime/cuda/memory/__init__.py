"""The GPU's memory and the way to it: devices, weights, pinned buffers, workspaces."""
