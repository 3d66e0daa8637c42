"""The tests of plan files and their rules."""
