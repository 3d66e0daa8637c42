"""The tests of loading checkpoints by plans."""
