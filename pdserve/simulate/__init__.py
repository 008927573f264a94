"""Replays request traces through the production placement, admission and scheduling code on a
virtual clock: `pdserve simulate`. `pdserve calibrate` measures the durations that it needs."""
