"""The target networks, by name."""

from clients.models.registry import MODELS, build_model, sized

__all__ = ["MODELS", "build_model", "sized"]
