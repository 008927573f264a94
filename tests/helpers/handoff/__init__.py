"""The production control halves of the hand-off, in a world where each event is a choice of the
test.

    D        a `KVSink`; its ranks execute and answer its commands when they are told to
    A, B     two `KVSource`s, with a rank each
    R        the router: reserves, gives the first ticket to A, and the next ones to B, A, …

`loop` runs them without a clock, `ranks` execute their commands, `world` contains everything and
checks every promise after every step. `tests/helpers/explorer.py` makes the choices.
"""
