"""The two fused kernels, forward and backward, and the weight gradients in plain Triton, for GPUs other than Hopper's.

They take the same arguments, use the same plan, buffers, counters and fault record, and write the same rows as the kernels
of the same names in ``titan_megamoe/kernels``, which explain the mathematics. What differs is who does the work. There, every
CTA has a warp for each role. In plain Triton all warps of a program do the same, so a role is a whole program's, one program to
an SM:

    pull_gemm, pull_gemm_backward   movers copy rows into the pool, until there are no more; then they multiply, too
                                    the others claim tiles, wait until the tile's rows are there, multiply
    gemm_push, gemm_push_backward   movers add up and send tokens, each once the tiles of its rows are done (and multiply at first,
                                    while hardly a token is complete)
                                    the others multiply; when there are no more tiles, they send, too

**Roles go by arrival, and first comes what others wait for.** A program takes a ticket from an atomic queue when it starts. The
tile that a multiplier of ``pull_gemm`` waits for is filled by movers, so there the first arrivals are the movers; the tokens that a
mover of ``gemm_push`` waits for are computed by multipliers, so there the last are. Roles by program index would do on an idle GPU.
But where another stream's kernel holds SMs, a GPU may start any part of the programs and the rest only when those end: if the ones
that started were all waiting for one that did not, none would ever end. By arrival, whoever waits has been preceded by those that
it waits for. One program alone does all of one role, then all of the other, without waiting for itself.

All other work is claimed from atomic queues, in an order in which an item waits only for items claimed before it. Every wait has
a deadline (``common.py``).

What a number is does not depend on who computes it: sums have a fixed order, and no floating-point number is added atomically.

Shape suffixes are those of ``plan_tables.py``.
"""
