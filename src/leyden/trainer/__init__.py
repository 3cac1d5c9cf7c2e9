"""Makes groups, trains on the finished ones, publishes the weights."""
