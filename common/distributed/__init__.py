"""Process groups, communicators, and the executors that run a node's ranks."""
