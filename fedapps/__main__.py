"""``python -m fedapps``: the command."""

from fedapps.commands.main import main

main()
