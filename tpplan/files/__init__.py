"""Files: text that is replaced whole or not at all, strict JSON, and frozen classes as documents."""
