"""Running a model's blocks: on the CPU, by a plan with a stand-in for the GPU; plans, devices and the cache."""
