"""Plans of flat buffers in equal shards, with little padding: two tensor orders, and a bisection of the shard size."""
