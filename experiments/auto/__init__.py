"""How `auto` is judged: the protocol, and the table of its runs."""
