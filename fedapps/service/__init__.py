"""A finished run as a thing to serve: every later client gets its model."""
