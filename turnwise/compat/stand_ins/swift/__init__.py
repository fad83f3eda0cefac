"""Interface of ms-swift 4.6.0, and the module names of 3.6, that schedulers, environments and rewards are written against."""
