"""Where tensors sit in flat buffers of equal shards, with as little padding as two orders and a bisection find."""
