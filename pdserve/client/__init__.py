"""What talks to a server from outside: any OpenAI-compatible one, errors typed as ours."""
