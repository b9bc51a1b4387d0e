"""What runs on a client: NumPyClient subclasses and their models."""
