"""The tests of the arguments of operations."""
