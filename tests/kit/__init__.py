"""What several tests share: worlds, scripted engines, servers as processes, small models, runs."""
