"""Rotary position embeddings: tables, their parameters in config.json, and context scaling."""
