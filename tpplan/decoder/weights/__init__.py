"""The weights of a device as the decoder computes with them: fused, stacked and quantised matrices, and products."""
