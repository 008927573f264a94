"""Replays request traces through the production placement, admission and scheduling, by a virtual
clock: `pdserve simulate`, and `pdserve calibrate`, which measures how long things take."""
