"""Decode steps, CUDA graphs of prefill passes and of steps, greedy choice and sampling, and errors about logits."""
