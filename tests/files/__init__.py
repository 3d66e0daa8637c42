"""The tests of files and documents."""
