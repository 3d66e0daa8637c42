"""Programs on CUDA devices: what the host prepares, tells kernels, and launches."""
