"""A token's loss, its divergence from a reference, and what is done about engines that disagree."""
