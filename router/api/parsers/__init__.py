"""What a model's text says beside its answer: reasoning and tool calls. Text in, events out."""
