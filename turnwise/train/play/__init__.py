"""What a run plays: tasks, demonstrations, evaluations, and when it stops playing."""
