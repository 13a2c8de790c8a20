"""Reports of verdicts: on the terminal, and as JSON lines."""
