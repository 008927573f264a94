"""gRPC servers and channels, authentication, error and protobuf conversion."""
