"""Commands of this package, a file each; what they need is imported when they run."""
