"""The page of seventy_b.py."""
