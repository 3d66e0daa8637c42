"""The group of processes that run one plan: they meet, tell each other plain data, and find who is lost."""
