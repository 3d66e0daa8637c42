"""What the commands ``bench``, ``selftest`` and ``devices --links`` do."""
