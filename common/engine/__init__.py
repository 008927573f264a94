"""Scheduling, without torch: what the next step computes, in which blocks, and the engine loop."""
