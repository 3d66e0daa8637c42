"""A plan in the words of other engines: their flags and settings, and what they will do differently."""
