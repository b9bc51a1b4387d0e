"""One reader per official file form."""
