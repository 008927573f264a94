"""`python -m pdserve.router.kit NAME…`: checks placement policies; exit code 1 if one is broken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from pdserve.common.core.errors import ConfigError
from pdserve.router.cluster.policies import load_policy
from pdserve.router.kit.checks import check_policy


def main(names: Sequence[str]) -> int:
    if not names:
        print("usage: python -m pdserve.router.kit NAME…   (module:Class)", file=sys.stderr)
        return 2
    broken = 0
    for name in names:
        try:
            load_policy(name, "policy")
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        for check, fault in check_policy(partial(load_policy, name, "policy")).items():
            broken += bool(fault)
            print(f"{'FAILED' if fault else 'ok':7}{name}: {check.replace('_', ' ')}", end="")
            print(f": {fault}" if fault else "")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
