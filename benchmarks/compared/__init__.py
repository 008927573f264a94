"""The parts of `peers.py`: servers, workloads and the report."""
