"""`pdserve bench serve`: when requests arrive, what they ask, how they are timed."""
