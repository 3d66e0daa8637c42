"""The tests of reading models: families, formats, checkpoints."""
