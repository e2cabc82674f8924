"""How good verdicts are, and what verdicts that need no encoder come to."""
