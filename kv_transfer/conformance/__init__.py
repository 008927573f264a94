"""The conformance kit: every promise of `kv_transfer/connector.py`, checked on one connector.

    pytest --pyargs pdserve.kv_transfer.conformance --kv-connector my_package.connector:MyConnector

Each test checks one promise: its docstring states the promise, its failure says what broke it. See
`docs/write-a-connector.md`.
"""
