"""The tests of what commands report."""
