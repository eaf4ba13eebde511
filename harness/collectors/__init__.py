"""Readings of a server and its machine. A source that cannot be read is a sample, never a zero."""
