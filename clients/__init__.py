"""What runs on a client: NumPyClient subclasses and their models.

`from fedapps.clients import Client` works for the names that a method's author needs."""

from fedapps.common.lazy import lazy

_MODULES = {
    "Arrays": "clients.core.arrays",
    "Client": "clients.core.client",
    "Config": "clients.core.client",
    "FewShot": "clients.core.protocol",
    "Metrics": "clients.core.client",
    "StateUse": "clients.core.protocol",
    "group": "clients.core.arrays",
    "model_arrays": "clients.core.arrays",
    "prefixed": "clients.core.arrays",
    "to_tensors": "clients.core.arrays",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605
__getattr__ = lazy(__name__, _MODULES)
