"""Text from prompts: generation, warm-up before it, and ``tpplan generate``."""
