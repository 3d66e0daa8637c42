"""The tests of links between GPUs, and of thresholds."""
