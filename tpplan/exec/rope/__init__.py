"""Rotary position embeddings: tables, what config.json says of them, and how models stretch them."""
