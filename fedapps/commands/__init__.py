"""The `fedapps` command: one file a command."""
