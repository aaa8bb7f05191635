"""Rows in Redis: the URL, the connection, the layouts of rows, and the store."""
