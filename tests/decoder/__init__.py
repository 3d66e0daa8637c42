"""The tests of the decoder."""
