"""Ranks that work together: one verdict for all of them, and keys that travel to their owners."""
