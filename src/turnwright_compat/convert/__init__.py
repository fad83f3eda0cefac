"""Reading launch scripts: what all frameworks share."""
