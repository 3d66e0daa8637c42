"""Text, tokens and chat templates of a checkpoint, whose files are untrusted."""
