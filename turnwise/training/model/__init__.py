"""What is trained: models made here or loaded, adapters, the reference, and the way by which weights leave."""
