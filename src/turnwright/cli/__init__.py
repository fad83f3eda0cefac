"""The command line: a file for each command, with its options, what it does and what it prints."""
