"""The control halves that serve, in a world where everything that happens is somebody's choice.

    D        a `KVSink`; its ranks do and answer what it asks of them when they are told to
    A, B     two `KVSource`s, and a rank each
    R        the router: reserves, gives the ticket to A, and the next ones to B, A, …

`loop` runs them without a clock, `ranks` are what they command, `world` has all of it and checks
every promise after every step. `tests/helpers/explorer.py` chooses.
"""
