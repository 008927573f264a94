"""`pdserve completion bash|zsh|fish`: prints a shell's completion script."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

from pdserve.cli.main import BENCHES, COMMANDS
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import import_string

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
USAGE = f"""usage: pdserve completion {"|".join(SHELLS)}

Prints the completion script for a shell. This takes some seconds, so save the output:

  bash  pdserve completion bash > ~/.local/share/bash-completion/completions/pdserve
  zsh   pdserve completion zsh > ~/.pdserve.zsh, and in ~/.zshrc: source ~/.pdserve.zsh
  fish  pdserve completion fish > ~/.config/fish/completions/pdserve.fish"""


def main(argv: Sequence[str]) -> int:
    if list(argv) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"takes one of {', '.join(SHELLS)}")
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[argv[0]](words()), end="")
    return 0


def words() -> dict[str, list[str]]:
    """Returns command → words that may follow it, from its --help; "" → the commands."""
    commands = {name: target for group in COMMANDS.values() for name, (target, _) in group.items()}
    found = {name: _flags(target) for name, target in commands.items()}
    found["bench"] = list(BENCHES)
    found |= {f"bench {name}": _flags(target) for name, (target, _) in BENCHES.items()}
    found["completion"] = list(SHELLS)
    return {"": list(commands), **found}


def _flags(target: str) -> list[str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit, ConfigError):
        import_string(target)(["--help"])
    return sorted(set(_FLAG.findall(said.getvalue())))


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(
        f'    "{command}") words="{" ".join(found)}" ;;' for command, found in words.items()
    )
    return f"""_pdserve() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="" words=""
  if [ "$COMP_CWORD" -gt 1 ]; then command="${{COMP_WORDS[1]}}"; fi
  if [ "$command" = bench ] && [ "$COMP_CWORD" -gt 2 ]; then command="bench ${{COMP_WORDS[2]}}"; fi
  case "$command" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _pdserve pdserve
"""


def _zsh(words: dict[str, list[str]]) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash(words)


def _fish(words: dict[str, list[str]]) -> str:
    lines = [f"complete -c pdserve -n __fish_use_subcommand -f -a '{' '.join(words[''])}'"]
    for command, found in words.items():
        first, _, second = command.partition(" ")
        if not first:
            continue
        seen = f"__fish_seen_subcommand_from {first}"
        seen += f"; and __fish_seen_subcommand_from {second}" if second else ""
        flags = [word[2:] for word in found if word.startswith("--")]
        lines += [f"complete -c pdserve -n '{seen}' -l {flag}" for flag in flags]
        if others := [word for word in found if not word.startswith("--")]:
            lines.append(f"complete -c pdserve -n '{seen}' -f -a '{' '.join(others)}'")
    return "\n".join(lines) + "\n"
