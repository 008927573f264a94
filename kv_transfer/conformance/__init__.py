"""The conformance kit: every promise of `kv_transfer/connector.py`, checked on one connector.

    pytest --pyargs pdserve.kv_transfer.conformance --kv-connector my_package.connector:MyConnector

One test a promise; each docstring says what is promised, each failure what was broken. See
`docs/write-a-connector.md`.
"""
