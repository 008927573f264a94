"""The parts of `bench_serving.py`: when requests arrive, what they ask, how they are timed."""
