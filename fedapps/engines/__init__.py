"""How a run is carried out: grids, Flower's own engine, several runs side by side."""
