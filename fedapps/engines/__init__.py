"""How a run is carried out: grids, Flower's own engine, several runs side by side."""

ENGINES = ("ray", "flower", "in-process")


def check_engine_name(engine: str) -> None:
    """Raise ValueError for an unknown engine."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
