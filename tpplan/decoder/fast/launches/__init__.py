"""On which tensors the kernels of the decoder are launched, and what they are told."""
