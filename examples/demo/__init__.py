"""What `make demo` runs: train on two ranks, dump, restart, serve, compare; see __main__.py."""
