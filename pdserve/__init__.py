"""pdserve: disaggregated prefill/decode serving for large language models.

Importing this imports nothing else. What plugins and clients may import of the packages below is
listed in docs/write-a-connector.md and docs/clients.md.
"""

__version__ = "0.1.0"
