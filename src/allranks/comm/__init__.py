"""Process groups, collectives with a name and a deadline, devices, threads and seeds. The lowest layer that imports torch."""
