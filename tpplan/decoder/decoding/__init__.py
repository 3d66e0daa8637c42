"""Prefill and decode step by step: prompts, their graphs, the choice of tokens, and what is wrong with logits."""
