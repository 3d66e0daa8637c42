"""The tests of what stands in for ExLlamaV2's modules."""
