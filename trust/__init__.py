"""Programs that attack embstore, for anyone to rerun: `make trust`. docs/reliability.md has the results."""
