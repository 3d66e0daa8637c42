"""The tests of a context's memory."""
