"""The parts of `chaos.py`: what clients ask, how they ask it, what goes wrong meanwhile."""
