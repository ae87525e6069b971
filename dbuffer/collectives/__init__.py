"""Collectives, one file for each operation.

| file | operation |
|---|---|
| ``all_gather`` | every rank receives the shards of all ranks |
| ``reduce_scatter`` | each rank receives the sum of its shard |
| ``all_reduce`` | every rank receives the sum or the maximum |
| ``all_to_all`` | each rank sends a different tensor to every other rank |
| ``broadcast`` | one rank's tensor replaces that of the others |
| ``parts`` | which tensors one combined collective may contain |
| ``waits`` | the wait for issued collectives, and what listeners are told |
| ``gloo_messages`` | asynchronous calls, exchanges and messages on gloo |

``*_together`` functions combine several tensors into one collective. Each file also has its shortcuts for gloo, which
need fewer copies and bytes than gloo's own collectives.

All functions work in place where the input is this rank's slice of the output. On an axis of one rank they issue
nothing. A collective either completes in stream order or, when ``works`` is given, appends a handle to wait for. The
caller must issue collectives on a communicator in the same order on every rank (docs/design/order.md).
"""
