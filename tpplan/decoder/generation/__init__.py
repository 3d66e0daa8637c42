"""From prompts to tokens: prefill and decode step by step, their graphs, sampling, and ``tpplan generate``."""
