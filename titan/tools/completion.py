"""Run `titan completion`: print what makes a shell complete commands, files and keys of a job. Imports no torch.

source <(titan completion)     in ~/.bashrc; in zsh, after `autoload -U bashcompinit && bashcompinit`
"""

from __future__ import annotations

from collections.abc import Sequence

from titan.commands import command_names
from titan.config.keys import fields_at
from titan.config.options import command_parser
from titan.config.schema import JobConfig

_SCRIPT = """_titan() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} choices=
  if [ "$COMP_CWORD" = 1 ]; then choices="{commands}"
  elif [[ $word == --* ]]; then choices="{keys}"; compopt -o nospace 2>/dev/null
  fi
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _titan titan"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    about = "Print what makes bash and zsh complete commands, files and keys of a job."
    command_parser("completion", summary=about).parse_args(argv)
    keys = [f"--{name}.{key}=" for name in JobConfig.model_fields for key in fields_at((name,))]
    print(_SCRIPT.format(commands=" ".join(command_names()), keys=" ".join(keys)))
    return 0
