"""The `wide` command: `main` finds the command's module; each module is one thin command."""
