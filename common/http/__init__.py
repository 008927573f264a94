"""HTTP servers open to unknown clients: limits on the number and idle time of connections."""
