"""The datasets: the table of what is known of them, and what reads them."""
