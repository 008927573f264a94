"""`pdserve completion bash|zsh|fish`: prints a shell's completion script."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.cli.main import BENCHES, COMMANDS
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import import_string

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VALUE = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*) (?:\{([^}]+)\}|[A-Z/])")
_WORD = re.compile(r"[a-z0-9][\w.-]*")  # and not NAME, which stands for any
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
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[argv[0]](commands()), end="")
    return 0


@dataclass(frozen=True, slots=True)
class Words:
    """The words that may follow a command, and the values of its flags; none: any, as of a file."""

    words: Sequence[str]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


def commands() -> dict[str, Words]:
    """Returns command → what may follow it, from its --help; "" → the commands."""
    targets = {name: target for group in COMMANDS.values() for name, (target, _) in group.items()}
    found = {name: _of(target) for name, target in targets.items()}
    found["bench"] = Words(list(BENCHES))
    found |= {f"bench {name}": _of(target) for name, (target, _) in BENCHES.items()}
    found["completion"] = Words(SHELLS)
    return {"": Words(list(targets)), **found}


def _of(target: str) -> Words:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit, ConfigError):
        import_string(target)(["--help"])
    text = " ".join(said.getvalue().split())
    values = {flag: _WORD.findall(choices) for flag, choices in _VALUE.findall(text)}
    return Words(sorted(set(_FLAG.findall(text))), values)


def _bash(found: Mapping[str, Words]) -> str:
    follow = "\n".join(
        f'    "{command}") words="{" ".join(each.words)}" ;;' for command, each in found.items()
    )
    values = "\n".join(f"    {case}" for case in _cases(found))
    return f"""_pdserve() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" flag="" prefix="" command="" words=""
  if [ "$COMP_CWORD" -gt 0 ]; then flag="${{COMP_WORDS[COMP_CWORD-1]}}"; fi
  if [ "$COMP_CWORD" -gt 1 ]; then command="${{COMP_WORDS[1]}}"; fi
  if [ "$command" = bench ] && [ "$COMP_CWORD" -gt 2 ]; then command="bench ${{COMP_WORDS[2]}}"; fi
  case "$current" in  # bash makes a word of each =, zsh does not
    --*=*) flag="${{current%%=*}}"; prefix="$flag="; current="${{current#*=}}" ;;
    =) current="" ;;
    *) if [ "$flag" = "=" ]; then flag="${{COMP_WORDS[COMP_CWORD-2]}}"; fi ;;
  esac
  case "$command" in
{follow}
  esac
  case "$command $flag" in
{values}
  esac
  COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$current"))
}}
complete -o default -F _pdserve pdserve
"""


def _cases(found: Mapping[str, Words]) -> Iterator[str]:
    """Yields the cases of flags with values; flags with the same values share one."""
    for command, each in found.items():
        flags: dict[str, list[str]] = {}
        for flag, words in each.values.items():
            flags.setdefault(" ".join(words), []).append(f'"{command} {flag}"')
        yield from (f'{"|".join(names)}) words="{words}" ;;' for words, names in flags.items())


def _zsh(found: Mapping[str, Words]) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash(found)


def _fish(found: Mapping[str, Words]) -> str:
    lines = [f"complete -c pdserve -n __fish_use_subcommand -f -a '{' '.join(found[''].words)}'"]
    for command, each in found.items():
        first, _, second = command.partition(" ")
        if not first:
            continue
        seen = f"__fish_seen_subcommand_from {first}"
        seen += f"; and __fish_seen_subcommand_from {second}" if second else ""
        for word in each.words:
            if word.startswith("--"):
                value = _fish_value(each.values.get(word))
                lines.append(f"complete -c pdserve -n '{seen}' -l {word[2:]}{value}")
        if others := [word for word in each.words if not word.startswith("--")]:
            lines.append(f"complete -c pdserve -n '{seen}' -f -a '{' '.join(others)}'")
    return "\n".join(lines) + "\n"


def _fish_value(values: Sequence[str] | None) -> str:
    if values is None:
        return ""
    return f" -x -a '{' '.join(values)}'" if values else " -r"
