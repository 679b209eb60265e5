"""`hpctrain completion SHELL`: print the script with which a shell completes hpctrain's commands, options and values.

The scripts are those of Click, with two changes for settings written KEY=VALUE. In bash, which splits words at '=', the
parts of a setting are joined again. And no space follows a completed word that ends with '='.
"""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)


@add_completion_class
class BashSettings(BashComplete):
    """Completion in bash. Readline splits words at '=' (COMP_WORDBREAKS) and replaces only the last part."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *= ]] && compopt -o nospace"
    )
    _offered_from = 0
    """Number of characters of a completion that are before the part which readline replaces."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor's word, and the cursor's word. Words that were split at '=' are joined
        again, except for an option and its value."""
        args, incomplete = super().get_completion_args()
        words, joined = [""], False
        for word in (*args, incomplete):
            if word == "=" and words[-1].startswith("--"):
                words.append("")
                joined = False
            elif word == "=" or words[-1].endswith("=") or not words[-1]:
                joined = bool(words[-1])
                words[-1] += word
            else:
                words.append(word)
                joined = False
        self._offered_from = words[-1].rfind("=") + 1 if joined else 0
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        offered = item.value[self._offered_from :] if item.type == "plain" else item.value
        return f"{item.type},{offered}"


@add_completion_class
class ZshSettings(ZshComplete):
    """Completion in zsh: no space follows a word that ends with '='."""

    source_template = ZshComplete.source_template.replace(
        '            if [[ "$descr" == "_" ]]; then',
        '            if [[ "$key" == *= ]]; then\n'
        '                compadd -U -S "" -V settings -- "$key"\n'
        '            elif [[ "$descr" == "_" ]]; then',
    )


SHELLS: dict[str, type[ShellComplete]] = {"bash": BashSettings, "zsh": ZshSettings, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion_command(shell: str) -> None:
    """Print the script with which a SHELL completes hpctrain's words: commands, options, names of runs, presets, and
    keys and values of --set.

    \b
    bash  eval "$(hpctrain completion bash)"                 in ~/.bashrc (bash 4.4 or later)
    zsh   eval "$(hpctrain completion zsh)"                  in ~/.zshrc, after compinit
    fish  hpctrain completion fish > ~/.config/fish/completions/hpctrain.fish
    """
    cli = click.get_current_context().find_root().command
    click.echo(SHELLS[shell](cli, {}, "hpctrain", "_HPCTRAIN_COMPLETE").source())
