"""The processes that train one model together, and a model in shards over them."""
