"""The kit for placement policies: a simulation of prefill nodes, and checks of what a policy
promises.

    python -m pdserve.router.kit my_package.policies:MyPolicy
"""
