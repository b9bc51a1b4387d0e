"""The Flower apps, the table of methods, the in-process grid and the command."""
