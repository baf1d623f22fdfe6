"""Command-line programs that stand on the trainer."""
