"""The tests of the command line, and of what it shows."""
