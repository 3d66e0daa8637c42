"""The tests of rotary embeddings."""
