"""A KV connector for pdserve that moves blocks through a shared directory."""
