"""The command line: commands, their arguments, and how they speak to a terminal."""
