"""Starting a run and seeing it through: the one place where explorer, trainer and store come together."""
