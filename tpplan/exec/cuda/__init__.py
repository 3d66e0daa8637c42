"""The backend on CUDA devices: streams, copies, events, graphs, and the encoding of kernels' parameters."""
