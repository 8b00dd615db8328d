"""Worker processes: the roles of a slot, and the process that hosts them."""
