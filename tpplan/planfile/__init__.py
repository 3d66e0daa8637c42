"""Plan files: reading, writing, and the numbered rules that every plan obeys."""
