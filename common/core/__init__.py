"""The error tree, what a request asks for, what a checkpoint says of its model, plugins, the host.
Standard library only."""
