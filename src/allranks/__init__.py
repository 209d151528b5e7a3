"""allranks: from one GPU to every rank."""
