"""Parts of ``soak``."""
