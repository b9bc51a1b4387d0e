"""Which samples belong to which client."""
