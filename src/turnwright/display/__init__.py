"""What a terminal shows of a run, and what its files tell: progress, diagnoses, texts."""
