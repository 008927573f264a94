"""What a step takes, part by part, beside what this machine could do."""
