"""What an adapter costs, and what a trainer's log says."""
