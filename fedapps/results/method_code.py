"""Which version of a method's code a run has measured: a digest of the files in `methods/` that the
method's client and strategy are made of.

Comments, docstrings, imports and the layout of lines do not count, so that the digest of a wheel is
that of the checkout. The digest says nothing of the code that all methods share."""

import ast
import hashlib
import inspect
import sys
from functools import cache

from fedapps.methods import METHODS

OF_METHODS = ".methods."
LENGTH = 12  # hexadecimal digits of a digest


@cache
def code_of(method: str) -> str:
    """The digest of a method's code; "" where Python has no source of it."""
    entry = METHODS[method]
    modules: set[str] = set()
    for kind in (entry.client, entry.strategy):
        modules.add(kind.__module__)
        for base in kind.__mro__:
            if OF_METHODS in base.__module__:
                modules.add(base.__module__)
    # A client or a strategy of `core/` belongs to all methods.
    own = sorted(name for name in modules if ".core." not in name)
    digest = hashlib.sha256()
    for name in own:
        try:
            source = inspect.getsource(sys.modules[name])
        except (OSError, TypeError):
            return ""
        digest.update(essence(source).encode())
    return digest.hexdigest()[:LENGTH]


def essence(source: str) -> str:
    """A module's source without comments, docstrings and imports, in one layout."""
    tree = _WithoutRemarks().visit(ast.parse(source))
    return ast.unparse(tree)


class _WithoutRemarks(ast.NodeTransformer):
    """Removes imports, and texts that are statements, as docstrings are."""

    def visit_Import(self, node: ast.Import) -> None:
        """Remove it."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remove it."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove a text."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node
