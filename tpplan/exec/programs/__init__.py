"""What an operation becomes: a program of commands; and the proof that no two touch the same bytes unordered."""
