"""The tests of programs, and of the proof that they are right."""
