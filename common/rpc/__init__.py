"""gRPC servers and channels, error ⇄ status, dataclass ⇄ protobuf."""
