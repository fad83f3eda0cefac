"""Process groups between a trainer and the servers that it samples from, and the other end of one."""
