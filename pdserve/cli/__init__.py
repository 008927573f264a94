"""The pdserve command: start roles as processes, a whole cluster, the demo."""
