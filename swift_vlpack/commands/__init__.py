"""The subcommands of `vlpack`. What needs torch or ms-swift is imported when a command runs."""
