"""The tests of what runs programs."""
