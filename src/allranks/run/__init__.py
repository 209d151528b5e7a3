"""How do the ranks get started, watched over and ended? The launcher: `allranks run`."""
