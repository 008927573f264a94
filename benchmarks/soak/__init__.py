"""The parts of `chaos.py`: requests, clients, load, and faults."""
