"""HTTP servers that strangers reach: how long a connection may wait, and how many there are."""
