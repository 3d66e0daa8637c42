"""What a model's config decides for the decoder: its settings, families, RoPE, gates, and formats of matrices."""
