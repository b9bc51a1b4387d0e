"""Mathematics of the strategies: no Flower, no messages."""
