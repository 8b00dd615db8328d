"""Start of the workers, and what the loop asks of them."""
