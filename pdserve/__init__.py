"""pdserve: disaggregated prefill/decode serving for large language models.

The packages below are the folders beside this one; installed, they are found nowhere else.
"""
