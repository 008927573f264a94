"""Process groups, collectives and executors."""
