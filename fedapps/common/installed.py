"""Whether optional libraries are installed, asked before work that needs them begins."""

from collections.abc import Sequence
from importlib.util import find_spec


def check_installed(what: str, libraries: Sequence[str], extra: str) -> None:
    """Raise ValueError if one of the libraries that `what` needs is missing; the package's `extra`
    installs them."""
    if missing := [name for name in libraries if find_spec(name) is None]:
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install 'fedapps[{extra}]'")
