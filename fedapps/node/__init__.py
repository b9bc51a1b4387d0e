"""What runs on a node: from a Flower message to a client, and its privacy ledger."""
