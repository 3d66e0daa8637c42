"""The tests of the commands that try a plan out."""
