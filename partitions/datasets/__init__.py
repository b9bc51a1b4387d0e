"""The datasets: the table of what is known of them, and what reads them."""

from fedapps.common.lazy import lazy

__getattr__ = lazy(__name__, {"Info": "partitions.datasets.loading"})  # documented before
