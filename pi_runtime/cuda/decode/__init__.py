"""One token through GPU and CPU: the calls on each side, and the schedule that joins them."""
