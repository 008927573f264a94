"""Process groups and their communicators; executors, which run a node's ranks."""
