"""How a dataset is divided among clients: one flwr-datasets Partitioner a file; the registry."""
