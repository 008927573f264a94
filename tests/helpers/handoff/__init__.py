"""The hand-off's parties as pure functions: what each may do next, and what it makes of a message.

    D        the decode node: its `SINK` machine, driven as `RecvTransfer` drives it, and its ranks
    A, B     two prefill nodes: a `SOURCE` machine each, driven as `SendTransfer` drives it
    R        the router: reserves, gives the ticket to A, and the next ones to B, A, …

Time has no clock here: a lease may lapse, a caller may lose patience, a rank may answer at any
moment, or never. A message that is never delivered is a lost one, a party that makes no move is
a stalled one. Renew postpones what may come at any time anyway: of it, only the refusal matters,
which may come late.

The tables are those of `kv_transfer/control/protocol.py` (or a mutant's), stepped by its `Machine`.
`tests/helpers/explorer.py` puts the parties together.
"""
