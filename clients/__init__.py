"""What runs on a client: NumPyClient subclasses and their models.

`from fedapps.clients import Client` works for the names that a method's author needs."""

from partitions.lazy import lazy

_MODULES = {
    "Arrays": "clients.arrays",
    "Client": "clients.base",
    "Config": "clients.base",
    "FewShot": "clients.protocol",
    "Metrics": "clients.base",
    "StateUse": "clients.protocol",
    "group": "clients.arrays",
    "model_arrays": "clients.arrays",
    "prefixed": "clients.arrays",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605
__getattr__ = lazy(__name__, _MODULES)
