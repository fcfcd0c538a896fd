"""The place stage: what belongs on the GPU, solved exactly."""
