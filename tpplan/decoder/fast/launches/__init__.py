"""Which tensors the decoder's kernels support, their grids and their parameters, and their launch on torch's stream."""
