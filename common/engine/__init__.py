"""The scheduler, the block pool and the engine loop, without torch."""
