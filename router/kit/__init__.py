"""The kit for placement policies: checks of their promises, some of them by simulation.

python -m pdserve.router.kit my_package.policies:MyPolicy
"""
